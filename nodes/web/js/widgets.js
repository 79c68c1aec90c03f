// Widgets of a node.

/** Calls `then` after the user has changed a widget. */
export function after(widget, then) {
  const { callback } = widget
  widget.callback = function (...rest) {
    const result = callback?.apply(this, rest)
    then()
    return result
  }
}
