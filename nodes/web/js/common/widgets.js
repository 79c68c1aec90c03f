// Widgets of a node.

/** The widget of a name; none where the node has no such one, or there is no node. */
export const widgetOf = (node, name) => node?.widgets?.find((widget) => widget.name === name)

/** The widget of a name; none where its value comes from another node. */
export function ownWidget(node, name) {
  const linked = node.inputs?.find((input) => input.widget?.name === name)?.link != null
  return linked ? undefined : widgetOf(node, name)
}

/**
 * The widget that an input's value comes from: the node's own, or where it is linked, that of a subgraph around the node
 * (`hosts`, the outermost first) or of a primitive. None where the value is known only when the graph runs.
 */
export function sourceWidget(node, name, hosts = []) {
  const { link: id } = node.inputs?.find((input) => input.widget?.name === name) ?? {}
  const link = id == null ? undefined : node.graph?.getLink(id)
  if (!link) return widgetOf(node, name)
  const { outputNode, subgraphInput } = link.resolve(node.graph)
  if (subgraphInput) return hosts.length ? sourceWidget(hosts.at(-1), subgraphInput.name, hosts.slice(0, -1)) : undefined
  return outputNode?.type.startsWith('Primitive') ? outputNode.widgets?.[0] : undefined
}

/** Calls `then` after the user has changed a widget. */
export const after = (widget, then) => afterCall(widget, 'callback', then)

/** Calls `then` after each call of a method. */
export function afterCall(object, name, then) {
  const method = object[name]
  object[name] = function (...rest) {
    const result = method?.apply(this, rest)
    then()
    return result
  }
}
