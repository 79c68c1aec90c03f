// Train LoRA: a preset fills in the widgets that it stands for, and changing one of them ends the preset. Which family
// the model is of, the browser reads from the name of the file that the loader in front has.
import { app } from '../../../../scripts/app.js'
import { ourNodes } from '../nodes.js'
import { setHint } from '../report_widget.js'
import { after, widgetOf } from '../widgets.js'
import { t } from '../words.js'

const TYPE = 'TesseraTrainLora'
const CUSTOM = 'custom'
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
      followPreset(this)
      return result
    }
    nodeType.prototype.onConnectionsChange = function (...rest) {
      const result = onConnectionsChange?.apply(this, rest)
      if (valueOf(this, 'preset') !== CUSTOM) tell(this)
      return result
    }
  },
  afterConfigureGraph() {
    for (const [node] of ourNodes()) if (node.type === TYPE) tell(node)
  },
})

const valueOf = (node, name) => widgetOf(node, name)?.value

function followPreset(node) {
  const preset = widgetOf(node, 'preset')
  after(preset, () => {
    const family = familyOf(node)
    if (preset.value.startsWith('motion') && family && !family.video) {
      preset.value = CUSTOM
      setHint(node, t('A motion is for video models, and {model} makes pictures: the preset is custom again.', { model: family.name }))
      return
    }
    for (const [name, value] of Object.entries(valuesOf(preset.value, family))) widgetOf(node, name).value = value
    tell(node)
  })
  for (const name of Object.keys(valuesOf(Object.keys(table.presets)[0]))) {
    after(widgetOf(node, name), () => {
      const wanted = valuesOf(preset.value, familyOf(node))[name]
      if (wanted === undefined || wanted === widgetOf(node, name).value) return
      preset.value = CUSTOM
      tell(node)
    })
  }
}

/** The values by name that a preset stands for; none for custom. */
function valuesOf(preset, family) {
  const values = table.presets[preset]
  return values ? { ...values, learning_rate: family?.learning_rate ?? table.learning_rate } : {}
}

/** The family of the model, by the names of files in the nodes in front; undefined where none says so. */
function familyOf(node) {
  for (let at = node, seen = new Set(); at && !seen.has(at);) {
    seen.add(at)
    const slot = at.inputs?.findIndex((input) => input.type === 'MODEL' && input.link != null) ?? -1
    if (slot < 0) return undefined
    at = at.getInputNode(slot)
    for (const { value } of at?.widgets ?? []) {
      if (typeof value !== 'string' || !MODEL_FILE.test(value)) continue
      const found = table.families.find(({ pattern }) => new RegExp(pattern).test(value.toLowerCase()))
      if (found) return found
    }
  }
  return undefined
}

/** Prints on the node what its preset has set, and what connected nodes set in its place. */
function tell(node) {
  const preset = valueOf(node, 'preset')
  const family = familyOf(node)
  const set = Object.keys(valuesOf(preset, family)).map((name) => `${name} ${valueOf(node, name)}`).join(', ')
  if (!set) {
    setHint(node)
    return
  }
  const linked = (name) => node.inputs.some((input) => input.name === name && input.link != null)
  const what = family ? t('{preset}, for {model}: {settings}.', { preset, model: family.name, settings: set }) : `${preset}: ${set}.`
  setHint(node, [what, ...Object.keys(INSTEAD_WORDS).filter(linked).map((name) => t(INSTEAD_WORDS[name]))].join(' '))
}
