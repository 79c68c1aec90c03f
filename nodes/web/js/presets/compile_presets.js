// Compile Model: a preset fills in the widgets that it stands for, and changing one of them ends the preset.
import { app } from '../../../../scripts/app.js'
import { after, widgetOf } from '../common/widgets.js'

const CUSTOM = 'custom'

app.registerExtension({
  name: 'tessera.compile.presets',
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== 'TesseraCompileModel') return
    const [, { presets }] = nodeData.input.optional.preset
    const { onNodeCreated } = nodeType.prototype
    nodeType.prototype.onNodeCreated = function (...rest) {
      const result = onNodeCreated?.apply(this, rest)
      followPresets(this, presets)
      return result
    }
  },
})

function followPresets(node, presets) {
  const widget = (name) => widgetOf(node, name)
  const preset = widget('preset')
  after(preset, () => {
    for (const [name, value] of Object.entries(presets[preset.value] ?? {})) widget(name).value = value
  })
  for (const name of new Set(Object.values(presets).flatMap(Object.keys))) {
    after(widget(name), () => {
      const wanted = presets[preset.value]?.[name]
      if (wanted !== undefined && wanted !== widget(name).value) preset.value = CUSTOM
    })
  }
}
