// Compare LoRAs: a node for the saves of a run; and the places for LoRAs of the two experts, whose names are the same but
// for their group, which isn't shown.
import { app } from '../../../../scripts/app.js'
import { widgetOf } from '../common/widgets.js'
import { t } from '../common/words.js'

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
    if (place) input.label = t('low noise {place}', { place })
  }
}

const KIND = 'TesseraCompareLoras'
const PREVIEW = 'TesseraPreview'
const SPACE = 60

/** The source of an input's value: a node and the number of its output; none where it is not linked. */
function sourceOf(node, name) {
  const slot = node?.inputs?.findIndex((input) => input.name === name) ?? -1
  const link = slot < 0 ? undefined : node.getInputLink(slot)
  const origin = link && node.graph.getNodeById(link.origin_id)
  return origin && { node: origin, slot: link.origin_slot }
}

/** The nearest source of an input of this name among the nodes before one. */
function sourceBefore(node, name) {
  const [waiting, seen] = [[node], new Set()]
  while (waiting.length) {
    const next = waiting.shift()
    if (!next || seen.has(next)) continue
    seen.add(next)
    const found = sourceOf(next, name)
    if (found) return found
    waiting.push(...(next.inputs ?? []).map((input) => sourceOf(next, input.name)?.node))
  }
}

/** The first place that is free: right of the node, below it, right of all. */
export function freePlace(node, size) {
  const others = node.graph.nodes
  const [left, top, width, height] = node.boundingRect
  const right = Math.max(...others.map(({ boundingRect: [x, , w] }) => x + w))
  const title = node.pos[1] - top
  const meets = ([x, y]) => others.some(({ boundingRect: [ox, oy, w, h] }) =>
    x < ox + w && ox < x + size[0] && y - title < oy + h && oy < y + size[1])
  /** @type {[number, number][]} */
  const places = [[left + width + SPACE, node.pos[1]], [left, top + height + SPACE + title]]
  return places.find((place) => !meets(place)) ?? [right + SPACE, node.pos[1]]
}

/** A prompt for what is compared, where the graph has none: the trigger words of the pictures. */
function promptFor(node, made) {
  const clip = sourceBefore(node, 'clip')
  const prompt = clip && LiteGraph.createNode('CLIPTextEncode')
  if (!prompt) return
  const pictures = sourceBefore(node, 'dataset')?.node
  widgetOf(prompt, 'text').value = widgetOf(pictures, 'trigger_words')?.value || 'a picture'
  prompt.pos = [made.pos[0], made.pos[1] + made.size[1] + SPACE]
  node.graph.add(prompt)
  clip.node.connect(clip.slot, prompt, 'clip')
  return { node: prompt, slot: 0 }
}

/**
 * Puts a Compare LoRAs with these LoRAs beside the node that trained them, sampled as its Training Preview says. Returns
 * what to tell of it.
 */
export function addComparison(node, loras) {
  const { graph } = node
  const text = loras.join('\n')
  let made = graph.nodes.find((other) => other.type === KIND && widgetOf(other, 'loras')?.value === text)
  if (!made) {
    made = LiteGraph.createNode(KIND)
    widgetOf(made, 'loras').value = text
    made.pos = freePlace(node, made.size)
    graph.add(made)
    const preview = sourceOf(node, 'preview')
    const asked = preview?.node.type === PREVIEW ? preview.node : undefined
    for (const widget of asked?.widgets ?? []) {
      const own = widgetOf(made, widget.name)
      if (own && widget.serialize !== false) own.value = widget.value
    }
    const wired = {
      model: sourceOf(node, 'model'), model_low_noise: sourceOf(node, 'model_low_noise'),
      vae: sourceOf(asked, 'vae') ?? sourceBefore(node, 'vae'),
      positive: sourceOf(asked, 'positive') ?? sourceBefore(node, 'positive') ?? promptFor(node, made),
      negative: sourceOf(asked, 'negative'), latent_image: sourceOf(asked, 'latent_image'),
      more_prompts: asked ? sourceOf(asked, 'preview') : preview,
    }
    for (const [name, source] of Object.entries(wired)) source?.node.connect(source.slot, made, name)
  }
  app.canvas.selectNode?.(made)
  app.canvas.centerOnNode?.(made)
  graph.setDirtyCanvas(true, true)
  const missing = ['vae', 'positive'].filter((name) => !sourceOf(made, name))
  return missing.length
    ? t('Connect {inputs} of Compare LoRAs, then press Run.', { inputs: missing.join(', ') })
    : t('Compare LoRAs is in the graph; press Run.')
}
