// The panel of a run on Train LoRA: how far it is, and its loss as a curve. All in it came from the server, so it is
// set as text, never as HTML.

import { button, curveIn, drawing, part } from '../common/elements.js'
import { language, t } from '../common/words.js'
import { between, lineOf, placing } from './curve.js'
import { drawStrip, makeStrip } from './preview_strip.js'

const HEIGHT = 232 // of the panel without previews, in pixels; the report gives it the room that it asks for
const WIDTH = 1000 // of the drawing, in units that are stretched to the node
const DEPTH = 100
const COLOURS = { loss: 'var(--descrip-text)', mean: '#2f74e6', validation: '#d97706', saves: '#059669' }
const END_WORDS = {
  finished: 'Finished', cancelled: 'Stopped', stopped: 'Stopped and kept', paused: 'Paused', failed: 'Ended by an error',
  unsaved: 'Not saved',
}

const ASK_WORDS = {
  stop: ['Stop and keep', 'End after this step as if it were the last: the LoRA is saved and the workflow continues.'],
  save: ['Save now', 'Save the LoRA and the state after this step, and continue training.'],
  sample: ['Sample now', 'Make all previews after this step, and continue training.'],
  cancel: ['Cancel', 'End now and save, without the rest of the workflow. The next Run continues.'],
}
const CURVE_WORDS = ['loss', 'mean', 'validation', 'saves']

/**
 * Makes an empty panel; `draw` fills it. `ask(what)` sends a wish to the server and returns why it can't be met. `copy`
 * `compare` and `goOn`, of a run that is over, return what to tell. `addressOf` is where the server gives a preview.
 */
export function makePanel(ask, { copy, compare, goOn }, addressOf) {
  const element = document.createElement('div')
  element.className = 'tessera-run'
  const head = part(element, 'tessera-run-head')
  const [step, left] = [part(head), part(head, 'tessera-right')]
  const facts = part(element, 'tessera-run-facts')
  const plot = part(element, 'tessera-run-plot')
  const svg = drawing(plot, [WIDTH, DEPTH], 'tessera-run-curve')
  const paths = {
    saves: curveIn(svg, COLOURS.saves, 2), loss: curveIn(svg, COLOURS.loss, 1), mean: curveIn(svg, COLOURS.mean, 2),
    validation: curveIn(svg, COLOURS.validation, 7),
  }
  paths.loss.style.opacity = '0.6'
  const legend = part(element, 'tessera-run-legend')
  const keys = {}
  for (const name of CURVE_WORDS) {
    keys[name] = part(legend, 'tessera-run-key')
    part(keys[name], 'tessera-swatch').style.background = COLOURS[name]
    keys[name].text = part(keys[name], '', 'span', { textContent: t(name) })
  }
  const strip = makeStrip(addressOf)
  element.append(strip.element)
  const foot = part(element, 'tessera-run-foot')
  const said = part(foot, 'tessera-run-said')
  const buttons = part(foot, 'tessera-run-buttons')
  const asks = {}
  for (const [what, [text, title]] of Object.entries(ASK_WORDS)) {
    asks[what] = button(buttons, t(text), t(title), async () => {
      wait(buttons, true)
      const problem = await ask(what)
      tell(problem ?? (what === 'cancel' ? t('Ends and saves.') : t('{what}: after this step.', { what: t(text) })))
    })
  }
  const tell = (text) => {
    panel.told = { at: panel.at, text }
    said.textContent = said.title = text
  }
  const over = part(foot, 'tessera-run-over')
  over.style.display = 'none'
  const once = (does) => async () => {
    wait(over, true)
    try {
      tell(await does())
    } catch (error) {
      tell(error.message)
    } finally {
      wait(over, false)
    }
  }
  const onward = t('Raise steps and queue the workflow on this page; training continues from the last step.')
  const named = t("Copy the name that ComfyUI's LoRA loaders list it by (press R there).")
  const copied = button(over, t('Copy LoRA name'), named, once(copy))
  const beside = t('Put a Compare LoRAs beside this node, with the saves of this run.')
  const compared = button(over, t('Compare saves'), beside, once(compare))
  const more = button(over, '', onward, once(goOn))
  const panel = Object.assign(element, {
    parts: { step, left, facts, svg, paths, keys, strip, asks, buttons, said, over, copied, compared, more },
    at: '', // where the run is
    told: /** @type {{at: string, text: string} | undefined} */ (undefined), // an answer, until the next step is done
  })
  return panel
}

function wait(buttons, on) {
  for (const each of buttons.children) each.disabled = on
  buttons.style.opacity = on ? 0.5 : 1
}

const digits = (value) => value.toPrecision(3)

/** Seconds as h:mm:ss. */
function clock(seconds) {
  const whole = Math.round(seconds)
  const two = (value) => String(value).padStart(2, '0')
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`
}

/** When a run last changed its record, short. */
const date = (seconds) => new Date(seconds * 1000).toLocaleString(language(), { dateStyle: 'short', timeStyle: 'short' })

const isDone = (run) => run.status === 'finished' && !run.running && run.loss_ends

/**
 * Shows a run as the server's routes tell it; `points` are all its points so far: step, loss, rate, mean. `further`:
 * steps that Continue would raise `steps` to, none to hide it.
 */
export function draw(panel, run, points, previews, further) {
  const { step, left, facts, svg, paths, keys, strip, asks, buttons, said, over, copied, compared, more } = panel.parts
  panel.dataset.height = HEIGHT + drawStrip(strip, previews)
  panel.style.height = `${panel.dataset.height}px`
  const last = points.at(-1)
  panel.at = `${run.running} ${run.status} ${run.step}`
  step.textContent = run.steps ? t('Step {step} / {steps}', run) : t('Step {step}', run)
  if (run.running) left.textContent = run.seconds_left == null ? '' : t('{time} left', { time: clock(run.seconds_left) })
  else left.textContent = Object.hasOwn(END_WORDS, run.status) ? t(END_WORDS[run.status]) : t('Broke off')
  facts.textContent = [
    !run.running && run.changed && date(run.changed),
    last && !isDone(run) && t('loss {value}', { value: digits(last[3]) }), // the sentence at the end says it
    last?.[2] != null && t('rate {value}', { value: Number(last[2].toPrecision(3)) }),
    run.seconds_per_step != null && t('{seconds} s per step', { seconds: digits(run.seconds_per_step) }),
    run.folder,
  ].filter(Boolean).join('  ·  ')
  facts.title = `${run.folder} ${run.model}`.trim()
  if (panel.told?.at !== panel.at) panel.told = undefined
  buttons.style.display = run.running ? 'flex' : 'none'
  wait(buttons, Boolean(panel.told))
  if (!run.can_sample) {
    asks.sample.disabled = true
    asks.sample.title = t('Connect a Training Preview to preview of this node, and run it again.')
  }
  asks.sample.style.opacity = run.can_sample ? 1 : 0.5
  over.style.display = !run.running && (run.lora || further) ? 'flex' : 'none'
  copied.style.display = run.lora ? '' : 'none'
  compared.style.display = run.lora && run.saves.length > 1 ? '' : 'none'
  more.style.display = further ? '' : 'none'
  more.textContent = t('Continue + {steps}', { steps: further - run.steps })
  said.textContent = panel.told?.text ?? sentence(run)
  said.title = said.textContent
  keys.validation.style.display = run.validation.length ? 'flex' : 'none'
  keys.saves.style.display = run.saves.length ? 'flex' : 'none'

  const most = between(points.map((point) => point[1]), 0.01) ?? []
  const shown = [...most, ...points.map((p) => p[3]), ...run.validation.map((p) => p[1])]
  const low = shown.reduce((a, b) => Math.min(a, b), Infinity)
  const high = shown.reduce((a, b) => Math.max(a, b), -Infinity)
  const ends = Math.max(run.steps, last?.[0] ?? 0, 2)
  const place = placing([WIDTH, DEPTH], [low, high], ends, 0.06)
  const { x, y } = place
  paths.loss.setAttribute('d', lineOf(points, 1, place))
  paths.mean.setAttribute('d', lineOf(points, 3, place))
  paths.validation.setAttribute('d', run.validation.map(([at, value]) => `M${x(Math.max(at, 1))} ${y(value)}h0`).join(''))
  paths.saves.setAttribute('d', run.saves.map((at) => `M${x(Math.max(at, 1))} ${DEPTH}v-8`).join(''))
  keys.loss.text.textContent = points.length ? t('loss {low} to {high}', { low: digits(low), high: digits(high) }) : t('loss')
  svg.setAttribute('aria-label', t('Loss of {count} points up to step {step}', { count: points.length, step: run.step }))
}

/** The end of a finished run: its time, where that is known, and the loss of its first and last twentieth. */
function ending({ seconds, timed_from: from, steps, loss_ends: [first, last] }) {
  const values = { first: digits(first), last: digits(last), from: from + 1, to: steps }
  if (seconds == null) return t('Done, loss from {first} to {last}', values)
  values.time = clock(seconds)
  return from
    ? t('Done, steps {from} to {to} in {time}, loss from {first} to {last}', values)
    : t('Done in {time}, loss from {first} to {last}', values)
}

/** What a paused run waits for. */
function waiting(run) {
  if (!run.next_prompt_id) return t('Paused at step {step}. Go on in the Training tab, or queue the workflow again.', run)
  if (!run.ahead) return t('Goes on at step {step}.', run)
  return run.ahead === 1
    ? t('Paused for 1 other prompt. Goes on by itself at step {step}.', run)
    : t('Paused for {ahead} other prompts. Goes on by itself at step {step}.', run)
}

function sentence(run) {
  if (run.running) return run.phase ?? ''
  if (run.status === 'finished') return run.loss_ends ? ending(run) : ''
  if (run.status === 'failed') return '' // its sentence stands on the node in red
  if (run.status === 'paused') return waiting(run)
  return run.text || (run.status ? '' : t('No end was recorded: it was killed, or another program is still training it.'))
}
