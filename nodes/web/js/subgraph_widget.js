// A widget of our own on a subgraph node. The widgets of such a node are found anew from its inputs at each look: the
// canvas gets ours behind them, and as Nodes 2.0 draws those of inputs only, there the element is put into the node.
import { app } from '../../../scripts/app.js'

const added = new WeakMap() // of a node: its widgets that are of no input

function addedTo(node) {
  const known = added.get(node)
  if (known) return known
  const own = []
  const found = Object.getOwnPropertyDescriptor(node, 'widgets')
  Object.defineProperty(node, 'widgets', { ...found, get: () => [...found.get.call(node), ...own] })
  added.set(node, own)
  return own
}

/** As a node's addDOMWidget; what it adds is in no saved workflow, which holds the values of inputs. */
export function addSubgraphWidget(node, name, type, element, options) {
  const own = addedTo(node)
  const widget = node.addDOMWidget(name, type, element, options)
  if (!node.widgets.includes(widget)) own.push(widget) // newer frontends keep it, and Nodes 2.0 draws it there
  return widget
}

export function removeSubgraphWidget(node, widget) {
  const own = addedTo(node)
  if (own.includes(widget)) own.splice(own.indexOf(widget), 1)
  else node.removeWidget(widget)
  widget.onRemove?.()
  widget.element.remove()
}

/** Puts the elements where Nodes 2.0 has no place for them; again and again, as it draws nodes anew. */
export function seat(node) {
  for (const { element, options } of added.get(node) ?? []) {
    Object.assign(element.style, LiteGraph.vueNodesMode
      ? { height: `${options.getMinHeight()}px`, width: 'auto', margin: '0 8px' }
      : { height: '100%', width: '100%', margin: 0 })
    if (!LiteGraph.vueNodesMode || node.graph !== app.canvas.graph) continue
    const body = document.querySelector(`[data-testid="node-body-${CSS.escape(node.id)}"]`)
    if (body && element.parentElement !== body) body.append(element)
  }
}
