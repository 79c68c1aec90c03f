// The form New LoRA: opens the workflow of a model with folder, trigger word, name and preset filled in, and queues it.
import { app } from '../../../../scripts/app.js'
import { api } from '../../../../scripts/api.js'
import { button, enable, part } from '../common/elements.js'
import { inFront, ourNodes } from '../common/nodes.js'
import { t, translations } from '../common/words.js'
import { widgetOf } from '../common/widgets.js'
import { FOLDER, ourWords } from '../templates.js'
import { WORDS } from './sentences.js'

const TRAINS = /_lora$/
const SEVERAL = /(kontext|edit|i2v|two_experts)_lora$/ // these take a second folder or model
const CLIPS = /(wan|ltx|video|minimax)/
const FOLDERS = { TesseraImageFolder: 'input/my_pictures', TesseraVideoFolder: 'input/my_clips' }
const TRAIN = 'TesseraTrainLora'
const OFF = [2, 4] // modes of nodes that don't run: muted, bypassed
const LOADER = /Loader|LoadDiffusionModel/

/** Makes the form, closed. `attempt` runs what may fail, and shows why it did; `tell` shows a sentence. */
export function makeNewRun(root, { attempt, tell }) {
  const box = part(root, 'tessera-new-run', 'details')
  part(box, '', 'summary', { textContent: t(WORDS.newRun) })
  const form = part(box, '', 'form')
  const fields = {
    model: field(form, WORDS.model, 'select'),
    folder: field(form, WORDS.folder, 'select'),
    trigger: field(form, WORDS.trigger, 'input', { placeholder: t(WORDS.triggerHint) }),
    name: field(form, WORDS.name, 'input', { placeholder: t(WORDS.nameHint) }),
    preset: field(form, WORDS.preset, 'select'),
  }
  const row = part(form, 'tessera-new-run-row')
  const run = (isQueued) => attempt(() => whileOff(buttons, async () => tell(await start(fields, isQueued))))
  const buttons = [
    button(row, t(WORDS.start), t(WORDS.startTitle), () => run(true)),
    button(row, t(WORDS.openOnly), t(WORDS.openOnlyTitle), () => run(false)),
  ]
  form.addEventListener('submit', (event) => { // Enter in a field
    event.preventDefault()
    buttons[0].click()
  })
  fields.model.addEventListener('change', () => attempt(() => listFolders(fields)))
  box.addEventListener('toggle', () => box.open && attempt(() => fill(fields)))
}

/** Does something while buttons take no presses: a second one would queue a second run. */
async function whileOff(buttons, does) {
  for (const each of buttons) enable(each, false)
  try {
    await does()
  } finally {
    for (const each of buttons) enable(each, true)
  }
}

/**
 * @template {'input' | 'select'} T
 * @param {T} tag
 */
function field(form, words, tag, more = {}) {
  const label = part(form, 'tessera-new-run-field', 'label')
  part(label, '', 'span', { textContent: t(words) })
  return part(label, '', tag, more)
}

async function fill(fields) {
  const { titles } = ourWords(await translations())
  const names = Object.keys(titles).filter((name) => TRAINS.test(name) && !SEVERAL.test(name))
  const plain = (name) => titles[name].replace(/^\d+ /, '')
  if (!fields.model.length) setOptions(fields.model, names.map((name) => [name, plain(name)]))
  const { optional } = await schema(TRAIN)
  if (!fields.preset.length) setOptions(fields.preset, optional.preset[1].options.map((name) => [name, name]))
  await listFolders(fields)
}

/** Lists the folders that the model's node takes, as they are on the disk now. */
async function listFolders({ model, folder }) {
  const kind = CLIPS.test(model.value) ? 'TesseraVideoFolder' : 'TesseraImageFolder'
  const { required } = await schema(kind)
  const names = required.folder[1].options
  setOptions(folder, names.map((name) => [name, name]), names.includes(folder.value) ? folder.value : FOLDERS[kind])
}

async function schema(type) {
  return (await (await api.fetchApi(`/object_info/${type}`)).json())[type].input
}

function setOptions(select, options, value = options[0]?.[0]) {
  select.replaceChildren(...options.map(([name, text]) => new Option(text, name)))
  if (options.some(([name]) => name === value)) select.value = value
}

/** Opens the workflow as the fields say, and queues it unless something lacks. Returns what to tell. */
async function start({ model, folder, trigger, name, preset }, isQueued) {
  const answer = await api.fetchApi(`/workflow_templates/${FOLDER}/${model.value}.json`)
  if (!answer.ok) throw new Error(t(WORDS.noTemplate, { name: model.value }))
  const run = name.value.trim() || folder.value.split('/').at(-1)
  await app.loadGraphData(await answer.json(), true, true, run)
  await app.refreshComboInNodes() // files and folders that came after the page
  const places = [...ourNodes()].map(([node, , hosts]) => ({ node, hosts }))
  for (const place of places) {
    if (place.node.type in FOLDERS) set(place.node, { folder: folder.value, trigger_words: trigger.value.trim() })
    if (place.node.type === TRAIN) set(place.node, { output_name: run, preset: preset.value })
    if (place.node.type === 'TesseraPreview' && trigger.value.trim()) showTrigger(place, trigger.value.trim(), model.value)
  }
  const lacking = missingFiles()
  if (lacking.length) throw new Error(t(WORDS.missing, { files: lacking.join(', ') }))
  if (!isQueued) return t(WORDS.opened, { name: run })
  return (await app.queuePrompt(0)) ? t(WORDS.queued, { name: run }) : ''
}

function set(node, values) {
  for (const [name, value] of Object.entries(values)) {
    const widget = widgetOf(node, name)
    if (!widget) continue
    widget.value = value
    widget.callback?.(value, app.canvas, node)
  }
}

/** Has the previews show what is trained: the templates' prompts show something else. */
function showTrigger(place, word, model) {
  const isPrompt = ({ name, type }) => type === 'CONDITIONING' && name !== 'negative'
  let found = inFront(place, isPrompt)
  while (found && !widgetOf(found.node, 'text')) found = inFront(found, isPrompt)
  if (found) set(found.node, { text: CLIPS.test(model) ? word : t(WORDS.photograph, { word }) })
}

/** Files of the loaders in the open workflow that ComfyUI doesn't have. */
function missingFiles() {
  const loaders = (app.rootGraph ?? app.graph).nodes.filter(({ type, mode }) => LOADER.test(type) && !OFF.includes(mode))
  const widgets = /** @type {any[]} */ (loaders.flatMap((node) => node.widgets ?? []))
  const missing = widgets.filter(({ value, options }) => Array.isArray(options?.values) && !options.values.includes(value))
  return [...new Set(missing.map(({ value }) => value))]
}
