// Places above the list of runs for a sentence.
import { part } from '../common/elements.js'

/** A place for a sentence. It is made before there is one: screen readers tell what comes into it. */
export function statusPlace(parent) {
  const element = part(parent, { flex: 'none', display: 'flex', gap: '6px', alignItems: 'start' })
  element.setAttribute('role', 'status')
  return element
}

/** Shows a sentence in a status place; none for an empty text. */
export function sentence(element, text, color = '') {
  element.replaceChildren()
  element.style.padding = text ? '0 10px 8px' : '0'
  if (text) part(element, { flex: 1, minWidth: 0, overflowWrap: 'anywhere', color }, 'span', { textContent: text })
}
