// One timer for all that the page looks at again and again: it rests while the page is hidden.

const TICK = 250 // milliseconds
/** @type {{ticks: number, does: () => void}[]} */
const looks = []
let count = 0

function tick() {
  if (document.visibilityState !== 'visible') return
  count += 1
  for (const { ticks, does } of looks) {
    if (count % ticks) continue
    try {
      does()
    } catch (error) {
      reportError(error) // as an error of the page, and the others still look
    }
  }
}

/** Calls `does` every so many milliseconds, a multiple of 250, while the page is seen. */
export function every(milliseconds, does) {
  if (!looks.length) setInterval(tick, TICK)
  looks.push({ ticks: milliseconds / TICK, does })
}
