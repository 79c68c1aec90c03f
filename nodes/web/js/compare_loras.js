// Compare LoRAs: the places for LoRAs of the two experts have the same names but for their group, which isn't shown.
import { app } from '../../../scripts/app.js'

const LOW_NOISE = /^lora_models_low_noise\.(lora\d+)$/

app.registerExtension({
  name: 'tessera.compare.places',
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== 'TesseraCompareLoras') return
    const { onNodeCreated, onConfigure } = nodeType.prototype
    nodeType.prototype.onNodeCreated = function (...rest) {
      const result = onNodeCreated?.apply(this, rest)
      // The frontend adds and takes away places in a handler of the node's own, which is there by now.
      const ownConnectionsChange = this.onConnectionsChange
      this.onConnectionsChange = function (...changed) {
        const answer = ownConnectionsChange?.apply(this, changed)
        nameLowNoise(this) // places are added at once, and taken away in the next frame
        requestAnimationFrame(() => nameLowNoise(this))
        return answer
      }
      nameLowNoise(this)
      return result
    }
    nodeType.prototype.onConfigure = function (...rest) {
      const result = onConfigure?.apply(this, rest)
      nameLowNoise(this)
      return result
    }
  },
})

function nameLowNoise(node) {
  for (const input of node.inputs) {
    const [, place] = LOW_NOISE.exec(input.name) ?? []
    if (place) input.label = `low noise ${place}`
  }
}
