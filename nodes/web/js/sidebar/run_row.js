// One run in the list. All that is shown of it came from files, so it is set as text, never as HTML.
import { button, enable, part } from '../common/elements.js'
import { previewAddress } from '../run/ask.js'
import { drawSparkline, makeSparkline } from './chart.js'
import { DRAG } from './lora_drop.js'
import { t } from '../common/words.js'
import { WORDS } from './sentences.js'

const STATES = ['finished', 'stopped', 'paused', 'cancelled', 'failed', 'unsaved']

/** Makes a row. `does` holds what its parts do: choose, open, report, add, pause, goOn, remove, and `dragged(event)`. */
export function makeRow(does) {
  const element = document.createElement('div')
  element.className = 'tessera-runs-row'
  Object.assign(element, { tabIndex: 0, draggable: true })
  element.setAttribute('role', 'listitem')
  const head = part(element, 'tessera-row-head', 'label')
  const box = part(head, '', 'input', { type: 'checkbox' })
  const name = part(head, 'tessera-cut', 'span')
  const picture = part(element, 'tessera-row-picture')
  const none = part(picture, 'pi pi-image', 'i')
  none.setAttribute('aria-hidden', 'true')
  const text = part(element, 'tessera-row-text')
  const [state, model] = [part(text, 'tessera-cut'), part(text, 'tessera-cut tessera-aside')]
  const sparkline = makeSparkline(text)
  const buttons = part(element, 'tessera-row-buttons')
  const open = button(buttons, t(WORDS.open), t(WORDS.openTitle), does.open)
  const report = button(buttons, t(WORDS.report), t(WORDS.reportTitle), does.report)
  const add = button(buttons, t(WORDS.add), t(WORDS.addTitle), does.add)
  const pause = button(buttons, t(WORDS.pause), t(WORDS.pauseTitle), does.pause)
  const goOn = button(buttons, t(WORDS.goOn), t(WORDS.goOnTitle), does.goOn)
  for (const each of [pause, goOn]) each.style.display = 'none'
  const remove = button(buttons, t(WORDS.delete), t(WORDS.deleteTitle), does.remove)
  box.addEventListener('change', () => does.choose(box.checked))
  element.addEventListener('dragstart', (event) => {
    if (!does.canAdd()) {
      event.preventDefault()
      return
    }
    event.dataTransfer.setData(DRAG, does.id)
    event.dataTransfer.effectAllowed = 'copy'
  })
  return Object.assign(element, {
    parts: { box, name, picture, none, state, model, sparkline, open, report, add, pause, goOn, remove },
    detail: /** @type {any} */ (undefined), // what the run itself told last
    sampled: '', // which preview is shown
    isOf: '', // which state of the run the list told last
    isOld: false, // what is shown is older than that
    isSeen: false,
    isAsked: false,
  })
}

/** Shows what the list tells of a run; `off` is why runs can't be deleted, `colour` that of its curve in the chart. */
export function drawRow(row, run, off, colour) {
  const { box, name, model, remove } = row.parts
  row.dataset.run = run.id
  row.title = run.folder
  name.textContent = run.folder
  box.checked = Boolean(colour)
  box.style.accentColor = colour ?? ''
  box.title = t(WORDS.choose, { name: run.folder })
  box.setAttribute('aria-label', box.title)
  const date = new Date(run.changed * 1000).toLocaleString(undefined, { dateStyle: 'medium', timeStyle: 'short' })
  model.textContent = [date, run.model].filter(Boolean).join(' · ')
  model.title = run.model
  enable(remove, !run.running && !off)
  remove.title = run.running ? t(WORDS.isRunning) : off || t(WORDS.deleteTitle)
}

/** Shows what a run itself tells: its state, its curve, whether it has a LoRA. */
export function drawDetail(row, detail, colour) {
  const { state, sparkline, add, pause, goOn } = row.parts
  const kind = detail.running ? 'running' : STATES.includes(detail.status) ? detail.status : 'brokeOff'
  state.textContent = t(WORDS[kind], { step: detail.step, steps: detail.steps || detail.step })
  state.title = detail.text || state.textContent
  state.style.color = detail.running ? '#059669' : kind === 'failed' ? 'var(--error-text)' : ''
  drawSparkline(sparkline, detail.loss, detail, colour)
  pause.style.display = detail.can_pause ? '' : 'none'
  goOn.style.display = kind === 'paused' && !detail.next_prompt_id ? '' : 'none'
  enable(add, detail.last_lora)
  add.title = detail.last_lora ? t(WORDS.addTitle) : t(WORDS.noLora)
  row.draggable = !add.disabled
}

/** Shows the last preview of a run; none for a run without previews. */
export function drawPreview(row, preview) {
  const { picture, none } = row.parts
  if (!preview) {
    picture.replaceChildren(none)
    return
  }
  const text = t(WORDS.preview, { step: preview.step })
  picture.replaceChildren()
  part(picture, '', 'img', {
    draggable: false, alt: text, title: text, src: previewAddress({ id: row.dataset.run, ...preview }, true),
  })
}
