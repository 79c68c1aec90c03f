// Places above the list of runs for a sentence.
import { part } from '../common/elements.js'

/** A place for a sentence. It is made before there is one: screen readers tell what comes into it. */
export function statusPlace(parent) {
  const element = part(parent, 'tessera-status')
  element.setAttribute('role', 'status')
  return element
}

/** Shows a sentence in a status place; none for an empty text. */
export function sentence(element, text, color = '') {
  element.replaceChildren()
  element.classList.toggle('tessera-said', Boolean(text))
  if (text) part(element, 'tessera-fit', 'span', { textContent: text }).style.color = color
}
