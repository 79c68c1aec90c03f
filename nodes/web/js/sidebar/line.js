// The trainings that wait in ComfyUI's queue, and their order.
import { button, part } from '../common/elements.js'
import { change, read } from '../run/ask.js'
import { t } from '../common/words.js'
import { WORDS } from './sentences.js'

/** Makes the list, empty and hidden. `attempt` runs what may fail, and shows why it did. */
export function makeLine(root, attempt) {
  const box = part(root, 'tessera-line')
  box.style.display = 'none'
  part(box, 'tessera-line-head', 'h3', { textContent: t(WORDS.next) })
  const list = part(box, '', 'ol')
  return Object.assign(box, { list, attempt })
}

/** Reads the line from the server and shows it. */
export async function loadLine(box) {
  draw(box, (await read('line')).line)
}

function draw(box, line) {
  box.style.display = line.length ? '' : 'none'
  box.list.replaceChildren()
  line.forEach(({ names }, place) => {
    const row = part(box.list, 'tessera-line-row', 'li')
    part(row, 'tessera-cut', 'span', { textContent: names.join(', ') })
    if (!place) return
    button(row, t(WORDS.earlier), t(WORDS.earlierTitle), () => box.attempt(() => moveUp(box, line, place)))
  })
}

/** Lets the training at `place` run before the one in front of it. */
async function moveUp(box, line, place) {
  const order = line.map((entry) => entry.prompt_id)
  order.splice(place - 1, 0, ...order.splice(place, 1))
  draw(box, (await change('line', { order })).line)
}
