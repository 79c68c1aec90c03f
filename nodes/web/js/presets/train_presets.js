// Train LoRA: a preset fills in the widgets that it stands for, and changing one of them ends the preset. An input that
// is linked to one of the subgraph around the node has its widget there. Which family the model is of, the browser reads
// from the name of the file that the loader in front has; with another model the preset fills in that one's values.
import { app } from '../../../../scripts/app.js'
import { inFront, ourNodes } from '../common/nodes.js'
import { every } from '../common/poll.js'
import { setHint } from '../report_widget.js'
import { after, sourceWidget, widgetOf } from '../common/widgets.js'
import { t } from '../common/words.js'

const TYPE = 'TesseraTrainLora'
const CUSTOM = 'custom'
const EVERY = 250 // milliseconds between two looks at the models in front, and at subgraph nodes
const MODEL_FILE = /\.(safetensors|sft|gguf|ckpt|pth?|bin)$/i
// Inputs of the node, and what is told where one is connected.
const INSTEAD_WORDS = {
  optimizer: 'The connected Optimizer sets learning_rate instead.',
  network: 'The connected LoRA Network sets rank instead.',
}

let table // of the schema: presets, families and the usual learning rate

app.registerExtension({
  name: 'tessera.train.presets',
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== TYPE) return
    table = nodeData.input.optional.preset[1]
    const { onNodeCreated, onConnectionsChange } = nodeType.prototype
    nodeType.prototype.onNodeCreated = function (...rest) {
      const result = onNodeCreated?.apply(this, rest)
      after(widgetOf(this, 'preset'), () => chosen(this, 'preset'))
      for (const name of filledIn()) after(widgetOf(this, name), () => chosen(this, name))
      return result
    }
    nodeType.prototype.onConnectionsChange = function (...rest) {
      const result = onConnectionsChange?.apply(this, rest)
      if (valueOf(this, 'preset') !== CUSTOM) tell(this, hostsOf(this))
      return result
    }
  },
  setup() {
    every(EVERY, lookAround)
  },
  afterConfigureGraph() {
    for (const { node, hosts } of trainNodes()) tell(node, hosts)
  },
})

const valueOf = (node, name, hosts) => sourceWidget(node, name, hosts)?.value
const hostsOf = (one) => trainNodes().find(({ node }) => node === one)?.hosts ?? []
const trainNodes = () =>
  [...ourNodes()].filter(([{ type }]) => type === TYPE).map(([node, path, hosts]) => ({ node, path, hosts }))
const filledIn = () => Object.keys(valuesOf(Object.keys(table.presets)[0]))

/** Acts on a change of a widget of the node's own. */
function chosen(node, name) {
  const hosts = hostsOf(node)
  if (sourceWidget(node, name, hosts) !== widgetOf(node, name)) return
  if (name === 'preset') fillIn(node, hosts)
  else endPreset(node, name, hosts)
}

const seen = new Map() // by the path of a Train LoRA: what was seen around it last
const filledFor = new WeakMap() // by Train LoRA: the family that its values are for

/** Acts on another model in front, and on changes of the widgets of subgraph nodes, of which Nodes 2.0 tells nobody. */
function lookAround() {
  for (const { node, path, hosts } of trainNodes()) {
    const isOutside = (name) => sourceWidget(node, name, hosts) !== widgetOf(node, name)
    const names = hosts.length ? ['preset', ...filledIn()].filter(isOutside) : []
    const values = () => new Map(names.map((name) => [name, valueOf(node, name, hosts)]))
    const [found, now, family] = [seen.get(path), values(), familyOf(node, hosts)]
    const last = found?.node === node && found.host === hosts[0] ? found.values : now
    const changed = names.filter((name) => last.has(name) && last.get(name) !== now.get(name))
    if (changed[0] === 'preset') fillIn(node, hosts)
    else for (const name of changed) endPreset(node, name, hosts)
    const isAnother = filledFor.has(node) && family !== filledFor.get(node)
    if (isAnother && valueOf(node, 'preset', hosts) in table.presets) fillIn(node, hosts)
    filledFor.set(node, family)
    seen.set(path, { node, host: hosts[0], values: values() })
  }
}

function fillIn(node, hosts) {
  const preset = sourceWidget(node, 'preset', hosts)
  const family = familyOf(node, hosts)
  filledFor.set(node, family)
  if (preset.value.startsWith('motion') && family && !family.video) {
    preset.value = CUSTOM
    hint(node, hosts, t('A motion is for video models, and {model} makes pictures: the preset is custom again.', { model: family.name }))
    return
  }
  for (const [name, value] of Object.entries(valuesOf(preset.value, family))) {
    const widget = sourceWidget(node, name, hosts)
    if (widget) widget.value = value // none where another node gives it
  }
  tell(node, hosts)
}

/** Makes the preset custom again where an input has another value than the preset's. */
function endPreset(node, name, hosts) {
  const preset = sourceWidget(node, 'preset', hosts)
  const wanted = valuesOf(preset?.value, familyOf(node, hosts))[name]
  if (wanted === undefined || wanted === valueOf(node, name, hosts)) return
  preset.value = CUSTOM
  tell(node, hosts)
}

/** The values by name that a preset stands for; none for custom. */
function valuesOf(preset, family) {
  const values = table.presets[preset]
  return values ? { ...values, learning_rate: family?.learning_rate ?? table.learning_rate } : {}
}

/** The family of the model, by the names of files in the nodes in front, of which the loader's counts before those of
 * LoRAs on its model; undefined where none says so. */
function familyOf(node, hosts) {
  let family
  for (let place = { node, hosts }, passed = new Set(); place && !passed.has(place.node);) {
    passed.add(place.node)
    place = inFront(place, (input) => input.type === 'MODEL' && input.link != null)
    const values = (place?.node.widgets ?? []).map(({ value }) => String(value).toLowerCase())
    const files = values.filter((value) => MODEL_FILE.test(value))
    const found = table.families.find(({ pattern }) => files.some((file) => new RegExp(pattern).test(file)))
    family = found ?? family
  }
  return family
}

/** Prints on the node what its preset has set, and what connected nodes set in its place. */
function tell(node, hosts) {
  const preset = valueOf(node, 'preset', hosts)
  const family = familyOf(node, hosts)
  const names = Object.keys(valuesOf(preset, family))
  if (!names.length) {
    hint(node, hosts)
    return
  }
  const elsewhere = names.filter((name) => !sourceWidget(node, name, hosts))
  const here = names.filter((name) => !elsewhere.includes(name))
  const set = here.map((name) => `${name} ${valueOf(node, name, hosts)}`).join(', ')
  const linked = (name) => node.inputs.some((input) => input.name === name && input.link != null)
  const what = family ? t('{preset}, for {model}: {settings}.', { preset, model: family.name, settings: set }) : `${preset}: ${set}.`
  hint(node, hosts, [
    what, ...elsewhere.map((name) => t('The node connected to {name} sets it instead.', { name })),
    ...Object.keys(INSTEAD_WORDS).filter(linked).map((name) => t(INSTEAD_WORDS[name])),
  ].join(' '))
}

/** Prints a line on the node and, where its preset is chosen on a subgraph around it, on those. */
function hint(node, hosts, text) {
  const isOutside = sourceWidget(node, 'preset', hosts) !== widgetOf(node, 'preset')
  for (const place of isOutside ? [node, ...hosts] : [node]) setHint(place, text)
}
