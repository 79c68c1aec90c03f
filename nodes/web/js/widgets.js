// Widgets of a node.

/** The widget of a name; none where the node has no such one, or there is no node. */
export const widgetOf = (node, name) => node?.widgets?.find((widget) => widget.name === name)

/** The widget of a name; none where its value comes from another node. */
export function ownWidget(node, name) {
  const linked = node.inputs?.find((input) => input.widget?.name === name)?.link != null
  return linked ? undefined : widgetOf(node, name)
}

/** Calls `then` after the user has changed a widget. */
export function after(widget, then) {
  const { callback } = widget
  widget.callback = function (...rest) {
    const result = callback?.apply(this, rest)
    then()
    return result
  }
}
