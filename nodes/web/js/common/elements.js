// Elements of what is drawn on a node.

/**
 * Puts a new element at the end of another one. `name`: its classes, of tessera.css.
 * @template {keyof HTMLElementTagNameMap} [T='div']
 * @param {ParentNode} parent
 * @param {string} [name]
 * @param {T} [tag]
 * @returns {HTMLElementTagNameMap[T]}
 */
export function part(parent, name = '', tag = /** @type {T} */ ('div'), fields = {}) {
  const element = document.createElement(tag)
  if (name) element.className = name
  Object.assign(element, fields)
  parent.append(element)
  return element
}

/** Keeps events of an element from the canvas, which would drag the node or zoom. */
export function keepFromCanvas(element, ...events) {
  for (const event of events) element.addEventListener(event, (happened) => happened.stopPropagation())
}

/** A button as they look on a node. `press` is called when it is clicked; `name`: further classes. */
export function button(parent, text, title, press, name = '') {
  const element = part(parent, `tessera-button ${name}`.trim(), 'button', { type: 'button', textContent: text, title })
  keepFromCanvas(element, 'pointerdown')
  element.addEventListener('click', press)
  return element
}

/** Has a button take presses, or not and look so. */
export function enable(pressed, isOn) {
  pressed.disabled = !isOn
  pressed.style.opacity = isOn ? 1 : 0.5
}

const SVG = 'http://www.w3.org/2000/svg'

/** A drawing of so many units, stretched to the width of its parent. */
export function drawing(parent, [width, height], name) {
  const svg = document.createElementNS(SVG, 'svg')
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`)
  svg.setAttribute('preserveAspectRatio', 'none')
  svg.setAttribute('role', 'img')
  svg.setAttribute('class', `tessera-drawing ${name}`)
  parent.append(svg)
  return svg
}

/** A path in a drawing, as wide however it is stretched. */
export function curveIn(svg, colour, width) {
  const path = document.createElementNS(SVG, 'path')
  for (const [name, value] of Object.entries({
    fill: 'none', 'stroke-width': width, 'stroke-linecap': 'round', 'stroke-linejoin': 'round',
    'vector-effect': 'non-scaling-stroke',
  })) path.setAttribute(name, value)
  path.style.stroke = colour
  svg.append(path)
  return path
}
