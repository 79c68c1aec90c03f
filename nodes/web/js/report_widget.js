// The text on a node, made when there is first something to show: before that a node looks as its schema says.
import { stateOf } from './common/state.js'
import { addSubgraphWidget, removeSubgraphWidget, seat } from './subgraph_widget.js'
import { widgetOf } from './common/widgets.js'

const WIDGET = 'tessera_report'
const LINE_HEIGHT = 15 // of tessera.css, as is the padding
const PADDING = 6
const MARGIN = 10 // the frontend's own, around every DOM widget
const MOST_LINES = 12
const MOST_LINES_OF_A_TABLE = 30
const PANEL_WIDTH = 360

function reportOf(node) {
  const found = widgetOf(node, WIDGET)
  if (found) return found
  const element = document.createElement('div')
  element.className = 'tessera-report'
  element.setAttribute('role', 'status')
  const options = {
    serialize: false, // out of the prompt, and below out of the saved workflow
    hideOnZoom: false,
    getMinHeight: () => height(node, element),
    getMaxHeight: () => height(node, element),
  }
  const widget = node.subgraph
    ? addSubgraphWidget(node, WIDGET, 'tessera', element, options)
    : node.addDOMWidget(WIDGET, 'tessera', element, options)
  widget.serialize = false
  return widget
}

/** Text whose columns are made of spaces. */
export function monospaced(text) {
  const element = document.createElement('div')
  element.textContent = text
  element.className = 'tessera-monospaced'
  return element
}

function height(node, element) {
  const letters = Math.max(20, Math.floor((node.size[0] - 40) / 6))
  const folded = (text) => text.split('\n').reduce((sum, line) => sum + Math.ceil((line.length || 1) / letters), 0)
  const fixed = [...element.children].filter((part) => part.dataset.height)
  const shown = fixed.reduce((sum, part) => sum + Number(part.dataset.height), 0)
  const texts = [...element.childNodes].filter((part) => !fixed.includes(part))
  const most = texts.some((part) => part.rows || part.className === 'tessera-monospaced') ? MOST_LINES_OF_A_TABLE : MOST_LINES
  const lines = texts.reduce((sum, part) => sum + (part.rows?.length ?? folded(part.textContent)), 0)
  return Math.min(lines, most) * LINE_HEIGHT + shown + 2 * (PADDING + MARGIN)
}

/** The sentence of an error, in red above all else; none takes it away. */
export function setError(node, text) {
  const state = stateOf(node)
  if ((text ?? '') === (state.error ?? '')) return
  state.error = text
  show(node, state.content)
}

/** A line on what the node is set to, below an error and above all else; none takes it away. */
export function setHint(node, text) {
  const state = stateOf(node)
  if ((text ?? '') === (state.hint ?? '')) return
  state.hint = text
  show(node, state.content)
}

function hintLine(text) {
  const element = document.createElement('div')
  element.className = 'tessera-hint'
  element.textContent = text
  return element
}

/** The panel of a run on the node of this path, above the lines; none takes it away. */
export function setPanel(node, path, panel) {
  const { panels, content } = stateOf(node)
  if (panel) panels.set(path, panel)
  else panels.delete(path)
  show(node, content, panel && PANEL_WIDTH)
}

/** What the record of a run notes, where the node says nothing: a page that did not see it begin got no event of it. */
export function setNotes(node, notes) {
  const state = stateOf(node)
  const { content, notes: told } = state
  if ((content.length && content !== told) || String(notes) === String(told ?? [])) return
  state.notes = notes
  show(node, notes)
}

function errorLine(text) {
  const element = document.createElement('div')
  element.className = 'tessera-error'
  element.setAttribute('role', 'alert')
  element.textContent = text
  return element
}

function remove(node) {
  const widget = widgetOf(node, WIDGET)
  if (!widget) return
  const room = widget.computedHeight ?? 0
  if (node.subgraph) removeSubgraphWidget(node, widget)
  else node.removeWidget(widget)
  node.setSize([node.size[0], Math.max(node.computeSize()[1], node.size[1] - room)])
}

/** Gives an element these parts. What is in it already is not moved, or it would lose the focus and how far it is scrolled. */
function fill(element, parts) {
  for (const part of [...element.childNodes]) if (!parts.includes(part)) part.remove()
  parts.forEach((part, at) => {
    const there = element.childNodes[at]
    if (there === part) return
    if (there) there.before(part)
    else element.append(part)
  })
}

/** Shows lines of text and tables, in place of what was there. A table may ask for a width of the node. */
export function show(node, content, leastWidth = 0) {
  const state = stateOf(node)
  state.content = content
  const { error, hint, panels } = state
  const head = [error && errorLine(error), hint && hintLine(hint), ...panels.values()]
  const said = [...head, ...content].filter(Boolean)
  if (!said.length) {
    remove(node)
    return
  }
  const { element } = reportOf(node)
  const isText = (part) => typeof part === 'string'
  fill(element, said.map((part, index) => (isText(part) && isText(said[index + 1]) ? `${part}\n` : part))) // a table ends its line
  element.normalize() // one text for lines that follow each other
  const width = Math.max(node.size[0], node.computeSize()[0], leastWidth)
  if (width > node.size[0]) node.setSize([width, node.size[1]]) // first, as the height depends on it
  node.setSize([width, Math.max(node.size[1], node.computeSize()[1])])
  seat(node)
  node.graph?.setDirtyCanvas(true, true)
}
