// The button for an estimate on Train LoRA: queues the nodes that it needs with a Training Estimate in its place, which
// has the same inputs, and shows the answer on it. Where the run doesn't fit, buttons set what makes it fit.
import { app } from '../../../../scripts/app.js'
import { api } from '../../../../scripts/api.js'
import { button, part } from '../common/elements.js'
import { inFront, ourNodes } from '../common/nodes.js'
import { sourceWidget, widgetOf } from '../common/widgets.js'
import { t } from '../common/words.js'
import { showRefused } from '../errors.js'
import { setError, show } from '../report_widget.js'
import { freePlace } from './compare_loras.js'

const TRAIN = 'TesseraTrainLora'
const ESTIMATE = 'TesseraTrainingEstimate'

const HEIGHT = 26 // of a button, and of the line below them, in pixels

// The input of Train LoRA whose node has a setting, and the type of that node.
const ON_OTHERS = {
  rank: ['network', 'TesseraLoraNetwork'], megapixels: ['data', 'TesseraPrepareDataset'],
  checkpointing: ['memory', 'TesseraMemory'], blocks_to_swap: ['memory', 'TesseraMemory'], quantize: ['memory', 'TesseraMemory'],
}

/** What a training would take, a table of what other settings would change, and a button for each that makes it fit. */
export function describeEstimate({ lines, rows, fixes }, node) {
  return [...lines, ...(rows.length ? [tableOf(rows)] : []), ...(fixes.length ? [buttonsOf(fixes, node)] : [])]
}

function tableOf(rows) {
  const element = document.createElement('table')
  element.className = 'tessera-table'
  for (const [index, cells] of rows.entries()) {
    const row = part(element, '', 'tr')
    for (const text of cells) part(row, '', index ? 'td' : 'th', { textContent: text })
  }
  return element
}

function buttonsOf(fixes, node) {
  const element = document.createElement('div')
  element.dataset.height = `${HEIGHT * (fixes.length + 1)}`
  for (const { name, value } of fixes) {
    const line = part(element)
    button(line, t('Set {name} to {value}', { name, value }), '', () => (said.textContent = set(node, name, value)))
  }
  const said = part(element, 'tessera-aside')
  said.setAttribute('role', 'status')
  return element
}

/** Gives a setting another value, where it is set. Returns what to say. */
function set(node, name, value) {
  const hosts = [...ourNodes()].find(([other]) => other === node)?.[2] ?? []
  const place = placeOfSetting({ node, hosts }, name)
  const widget = place && sourceWidget(place.node, name, place.hosts)
  if (!widget) return t('{name} comes from another node; set it to {value} there.', { name, value })
  widget.value = value
  widget.callback?.(value)
  app.canvas.setDirty(true, true)
  return t('{name} is {value} now.', { name, value })
}

/** The node that has the setting, and the subgraph nodes that it is in; a Training Memory is added where there is none. */
function placeOfSetting(train, name) {
  const [input, type] = ON_OTHERS[name] ?? []
  const source = input && inFront(train, (slot) => slot.name === input)
  if (source) return source.node.type === type ? source : undefined
  const { node } = train
  if (type !== 'TesseraMemory') return widgetOf(node, name) && train
  const slot = node.inputs.findIndex((one) => one.name === input)
  if (node.inputs[slot].link != null) return undefined
  const made = LiteGraph.createNode(type)
  made.pos = freePlace(node, made.size)
  node.graph.add(made)
  made.connect(0, node, slot)
  return { node: made, hosts: train.hosts }
}

app.registerExtension({
  name: 'tessera.estimate',
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== TRAIN) return
    const { onNodeCreated } = nodeType.prototype
    nodeType.prototype.onNodeCreated = function (...rest) {
      const result = onNodeCreated?.apply(this, rest)
      const widget = this.addWidget('button', 'tessera_estimate', null, () => queue(this), { serialize: false })
      widget.serialize = false // out of the saved workflow; the option keeps it out of the prompt
      widget.label = t('Estimate time and memory')
      return result
    }
  },
})

/** The nodes of a prompt that one of them needs, itself included. */
function needed(prompt, id, found = {}) {
  if (found[id] || !prompt[id]) return found
  found[id] = prompt[id]
  for (const value of Object.values(prompt[id].inputs)) if (Array.isArray(value)) needed(prompt, String(value[0]), found)
  return found
}

async function queue(node) {
  const path = [...ourNodes()].find(([other]) => other === node)?.[1]
  setError(node, '')
  const { output, workflow } = await app.graphToPrompt()
  if (!path || !output[path]) {
    show(node, [t('This node is muted or bypassed, so there is nothing to estimate.')])
    return
  }
  const prompt = { ...needed(output, path), [path]: { ...output[path], class_type: ESTIMATE } }
  // before it is queued: a short one is answered sooner than the request that queues it
  show(node, [t('The estimate is queued: it takes two steps and writes no LoRA.')])
  try {
    await api.queuePrompt(0, { output: prompt, workflow })
  } catch (error) {
    show(node, [])
    const refused = error.response?.node_errors ?? {}
    if (Object.keys(refused).length) showRefused(refused)
    else setError(node, error.message)
  }
}
