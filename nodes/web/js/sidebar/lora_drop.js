// A run's LoRA on the graph: a loader where the run is dropped, or in the middle of what is seen.
import { app } from '../../../../scripts/app.js'
import { widgetOf } from '../common/widgets.js'
import { t } from '../common/words.js'
import { WORDS } from './sentences.js'

export const DRAG = 'application/x-tessera-run' // holds the run's id, so that no other page can say what is loaded
const KIND = 'LoraLoaderModelOnly'

/** Adds a loader of a LoRA, named as ComfyUI lists it. `at`: where its title begins. Returns what to tell of it. */
export function addLoader(lora, at) {
  const node = LiteGraph.createNode(KIND)
  const graph = app.canvas.graph ?? app.graph
  if (!node) return t(WORDS.noLoader)
  const widget = widgetOf(node, 'lora_name')
  const listed = widget.options?.values
  // The list is of when the page was opened; to renew it all nodes would be asked for again.
  if (Array.isArray(listed) && !listed.includes(lora)) widget.options.values = [...listed, lora]
  widget.value = lora
  node.pos = [at[0], at[1] + LiteGraph.NODE_TITLE_HEIGHT]
  app.canvas.emitBeforeChange?.() // for the page's own Undo
  graph.add(node)
  app.canvas.emitAfterChange?.()
  app.canvas.selectNode?.(node)
  graph.setDirtyCanvas(true, true)
  return t(WORDS.added, { lora })
}

/** The middle of what is seen of the graph. */
export function middle() {
  const { left, top, width, height } = app.canvas.canvas.getBoundingClientRect()
  const [x, y] = app.clientPosToCanvasPos([left + width / 2, top + height / 2])
  return [x - LiteGraph.NODE_WIDTH / 2, y]
}

const isOnGraph = ({ target }) =>
  target === app.canvas?.canvas || Boolean(target?.closest?.('#graph-canvas-container, [data-node-id]'))

/** Takes runs that are dropped on the graph. `dropped(id, at)` adds the LoRA. */
export function takeDrops(dropped) {
  const take = (does) => (event) => {
    if (!event.dataTransfer?.types.includes(DRAG) || !isOnGraph(event)) return
    event.preventDefault()
    event.stopImmediatePropagation() // the page would look for a file in it
    does(event)
  }
  window.addEventListener('dragover', take((event) => (event.dataTransfer.dropEffect = 'copy')), true)
  window.addEventListener('drop', take((event) => {
    dropped(event.dataTransfer.getData(DRAG), app.clientPosToCanvasPos([event.clientX, event.clientY]))
  }), true)
}
