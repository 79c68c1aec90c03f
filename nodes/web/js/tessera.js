// Shows on Tessera's nodes what a run says of itself: notes and saved files while it runs, a summary when it has ended.
// The phase and the step stand in ComfyUI's own progress text.
import { app } from '../../../scripts/app.js'
import { api } from '../../../scripts/api.js'

const WIDGET = 'tessera_report'
const LINE_HEIGHT = 15
const PADDING = 6
const MARGIN = 10 // the frontend's own, around every DOM widget

const describe = {
  TesseraPrepareDataset: ({ summary }) => [summary],
  TesseraLatentsToDataset: ({ pictures, notes = [] }) => [`${pictures} pictures`, ...notes],
  TesseraTrainLora: describeRun,
  TesseraSaveLora: ({ filename, subfolder, format, dtype }) => [
    `Saved: output/${subfolder ? `${subfolder}/` : ''}${filename}`,
    `${format}, ${dtype}`,
  ],
}

function describeRun(run) {
  const lines = [`Saved: output/${run.path}`]
  const loss = run.loss ?? []
  if (loss.length) {
    const tenth = Math.max(1, Math.floor(loss.length / 10))
    const mean = (part) => (part.reduce((sum, value) => sum + value, 0) / part.length).toFixed(4)
    lines.push(`${run.steps_done} steps, mean loss ${mean(loss.slice(0, tenth))} in the first tenth, ` +
      `${mean(loss.slice(-tenth))} in the last`)
  }
  if (run.seconds_per_step != null) lines.push(`${run.seconds_per_step} s per step`)
  if (run.compile) lines.push(`${run.graphs_compiled} graphs compiled in ${run.compile_seconds} s`)
  if (run.peak_memory_mib != null) {
    lines.push(`Peak memory of the ${run.peak_memory_of}: ${(run.peak_memory_mib / 1024).toFixed(2)} GiB`)
  }
  return [...lines, ...(run.notes ?? [])]
}

/** The node's report, made when there is first something to show: before that a node looks as its schema says. */
function reportOf(node) {
  const found = node.widgets?.find((widget) => widget.name === WIDGET)
  if (found) return found
  const element = document.createElement('div')
  element.className = 'tessera-report'
  element.setAttribute('role', 'status')
  Object.assign(element.style, {
    boxSizing: 'border-box', width: '100%', height: '100%', overflow: 'auto', padding: `${PADDING}px`,
    fontSize: '11px', lineHeight: `${LINE_HEIGHT}px`, whiteSpace: 'pre-wrap', overflowWrap: 'anywhere',
    userSelect: 'text', color: 'var(--input-text)', background: 'var(--comfy-input-bg)', borderRadius: '4px',
  })
  const widget = node.addDOMWidget(WIDGET, 'tessera', element, {
    serialize: false, // out of the prompt, and below out of the saved workflow
    hideOnZoom: false,
    getMinHeight: () => height(node, element),
    getMaxHeight: () => height(node, element),
  })
  widget.serialize = false
  return widget
}

function height(node, element) {
  const letters = Math.max(20, Math.floor((node.size[0] - 40) / 6))
  const lines = element.textContent.split('\n').reduce((sum, line) => sum + Math.ceil((line.length || 1) / letters), 0)
  return Math.min(lines, 12) * LINE_HEIGHT + 2 * (PADDING + MARGIN)
}

function show(node, lines) {
  const { element } = reportOf(node)
  element.textContent = lines.filter(Boolean).join('\n')
  const [width, wanted] = node.computeSize()
  node.setSize([Math.max(node.size[0], width), Math.max(node.size[1], wanted)])
  node.graph?.setDirtyCanvas(true, true)
}

/** The node that the server names: ids of nodes in subgraphs are paths such as 12:5. */
function nodeAt(path) {
  let graph = app.rootGraph ?? app.graph
  let node
  for (const id of String(path).split(':')) {
    node = graph?.getNodeById(id)
    graph = node?.subgraph
  }
  return node
}

const liveLines = { note: ({ text }) => text, saved: ({ file }) => `Saved: ${file}` }

app.registerExtension({
  name: 'tessera.reports',
  setup() {
    api.addEventListener('tessera.train', ({ detail }) => {
      const line = liveLines[detail.kind]?.(detail)
      const node = nodeAt(detail.node)
      if (!line || !node) return
      node.tesseraLines = [...(node.tesseraLines ?? []), line]
      show(node, node.tesseraLines)
    })
  },
  beforeRegisterNodeDef(nodeType, nodeData) {
    const lines = describe[nodeData.name]
    if (!lines) return
    const { onExecuted, onExecutionStart } = nodeType.prototype
    nodeType.prototype.onExecutionStart = function (...rest) {
      onExecutionStart?.apply(this, rest)
      this.tesseraLines = []
    }
    nodeType.prototype.onExecuted = function (output, ...rest) {
      onExecuted?.call(this, output, ...rest)
      const [payload] = output?.tessera ?? []
      if (payload) show(this, lines(payload))
    }
  },
})
