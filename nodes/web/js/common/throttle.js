/** A function that calls `does` `wait` milliseconds after it was called; calls until then are that one. */
export function throttle(wait, does) {
  let timer
  return () => {
    timer ??= setTimeout(() => {
      timer = undefined
      does()
    }, wait)
  }
}
