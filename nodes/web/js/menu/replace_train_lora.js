// Core's Train LoRA has an entry in its menu that puts this pack's nodes in its place: what corresponds is copied and
// linked, and a note says what was left behind. One step of undo takes it all back.
import { app } from '../../../../scripts/app.js'
import { widgetOf } from '../common/widgets.js'
import { t } from '../common/words.js'
import { left } from './left_behind.js'

const CORE = 'TrainLoraNode'
const GAP = 80 // between the nodes that take its place: room for a title, and for the higher nodes of Nodes 2.0

// Inputs of core's node, and where each of them goes.
const ON_DATA = { latents: 'latents', positive: 'positive' }
const ON_TRAIN = {
  model: 'model', steps: 'steps', learning_rate: 'learning_rate', rank: 'rank', batch_size: 'batch_size',
  grad_accumulation_steps: 'gradient_accumulation', seed: 'seed',
}
const OUTPUTS = { lora: 'lora', loss_map: 'loss' }

app.registerExtension({
  name: 'tessera.menu.train_lora',
  getNodeMenuItems(node) {
    if (/** @type {any} */ (node.constructor).comfyClass !== CORE) return []
    return [null, { content: t("Replace by Tessera's"), callback: () => replace(node) }]
  },
})

function replace(old) {
  const { graph } = old
  app.canvas.emitBeforeChange()
  graph.beforeChange()
  try {
    const [data, train, note] = ['TesseraLatentsToDataset', 'TesseraTrainLora', 'Note'].map((type) => {
      const node = LiteGraph.createNode(type)
      graph.add(node)
      return node
    })
    for (const node of [data, train]) node.mode = old.mode // muted and bypassed
    const reasons = copyValues(old, train)
    for (const [node, names] of [[data, ON_DATA], [train, ON_TRAIN]]) {
      for (const [from, to] of Object.entries(names)) linkInput(old, from, node, to)
    }
    for (const [from, to] of Object.entries(OUTPUTS)) linkOutputs(old, from, train, to)
    data.connect(0, train, slot(train.inputs, 'data'))
    reasons.push(...left(old))
    place(old, data, train, note, reasons)
    graph.remove(old)
    app.canvas.selectItems?.([train])
  } finally {
    graph.afterChange()
    app.canvas.emitAfterChange()
  }
  app.canvas.setDirty(true, true)
}

const slot = (slots, name) => slots.findIndex((one) => one.name === name)

/** Copies the values; returns a sentence for each that does not fit. */
function copyValues(old, train) {
  const reasons = []
  for (const [from, to] of Object.entries(ON_TRAIN)) {
    const [given, widget] = [widgetOf(old, from), widgetOf(train, to)]
    if (!given || !widget) continue
    const { max } = widget.options
    widget.value = typeof max === 'number' ? Math.min(given.value, max) : given.value
    if (widget.value !== given.value) reasons.push(`${to} is ${max}, the most there is; it was ${given.value}.`)
  }
  return reasons
}

function linkInput(old, from, node, to) {
  const { link: id } = old.inputs.find((input) => input.name === from) ?? {}
  const link = id == null ? undefined : old.graph.getLink(id)
  if (!link) return
  const target = slot(node.inputs, to)
  const { outputNode, subgraphInput } = link.resolve(old.graph)
  if (outputNode) outputNode.connect(link.origin_slot, node, target, link.parentId)
  else subgraphInput?.connect(node.inputs[target], node, link.parentId) // an input of the subgraph that it is in
}

function linkOutputs(old, from, node, to) {
  const source = slot(node.outputs, to)
  for (const id of [...(old.outputs.find((output) => output.name === from)?.links ?? [])]) {
    const link = old.graph.getLink(id)
    const { inputNode, subgraphOutput } = link.resolve(old.graph)
    if (inputNode) node.connect(source, inputNode, link.target_slot, link.parentId)
    else subgraphOutput?.connect(node.outputs[source], node, link.parentId)
  }
}

/** Train LoRA below the data, at the old node's place, with room to grow, and the note above them. */
function place(old, data, train, note, reasons) {
  const [x, y] = old.pos
  const width = Math.max(old.size[0], data.size[0], train.size[0])
  const size = (node, height) => node.setSize([width, Math.max(height, node.computeSize()[1])])
  for (const node of [data, train]) size(node, node.size[1])
  if (old.title !== old.constructor.title) train.title = old.title

  note.title = "From core's Train LoRA"
  widgetOf(note, 'text').value = [
    reasons.length ? "Settings that couldn't be carried over:" : 'All settings were copied.',
    ...reasons.map((reason) => `- ${reason}`),
  ].join('\n')
  size(note, 50 + 18 * reasons.reduce((lines, reason) => lines + Math.ceil((7 * reason.length) / width), 1))

  note.pos = [x, y - note.size[1] - GAP]
  data.pos = [x, y]
  train.pos = [x, y + data.size[1] + GAP]
}
