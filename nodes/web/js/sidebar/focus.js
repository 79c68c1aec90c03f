// The keyboard's focus. On the page's body keys would reach the graph, where some delete nodes.

const isSeen = (element) => !element.disabled && element.getClientRects().length > 0

/** Draws a part of the tab, and keeps the focus in it: where its element goes, one of the same name, or `next()`, gets it. */
export function keepFocus(root, draws, next) {
  const before = document.activeElement
  const had = root.contains(before)
  draws()
  if (!had || (root.contains(document.activeElement) && isSeen(document.activeElement))) return
  const name = before.getAttribute('aria-label')
  const same = [...root.querySelectorAll('button')].find((each) => name && each.getAttribute('aria-label') === name)
  const others = ['[role=status] button', '.tessera-runs-row'].map((found) => root.querySelector(found))
  const to = [before, same, next?.(), ...others, root].find((each) => root.contains(each ?? null) && isSeen(each))
  to?.focus({ preventScroll: true })
}
