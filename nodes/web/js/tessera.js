// Shows on Tessera's nodes what they say of themselves: notes and saved files while they run, a summary at the end.
// The phase and the step stand in ComfyUI's own progress text.
import { app } from '../../../scripts/app.js'
import { api } from '../../../scripts/api.js'
import { TABLE_WIDTH, describeCompiling } from './compile_report.js'
import { nodeAt } from './nodes.js'
import { monospaced, picture, show } from './report_widget.js'

const describe = {
  TesseraPrepareDataset: ({ summary }) => [summary],
  TesseraLatentsToDataset: ({ pictures, notes = [] }) => [`${pictures} pictures`, ...notes],
  TesseraLoraNetwork: ({ text }) => [monospaced(text)],
  TesseraTrainLora: describeRun,
  TesseraSaveLora: ({ filename, subfolder, format, dtype, notes = [] }) => [
    `Saved: output/${subfolder ? `${subfolder}/` : ''}${filename}`,
    `${format}, ${dtype}`,
    ...notes,
  ],
  TesseraLoadDiffusionModel: ({ notes }) => notes,
  TesseraBlockSwap: ({ notes }) => notes,
  TesseraCompileModel: ({ notes }) => notes,
  TesseraCompileReport: describeCompiling,
  TesseraTuneCompile: ({ text }) => [monospaced(text)],
}

const leastWidth = { TesseraLoraNetwork: TABLE_WIDTH, TesseraCompileReport: TABLE_WIDTH, TesseraTuneCompile: TABLE_WIDTH }

function describeRun(run) {
  const lines = [run.path ? `Saved: output/${run.path}` : 'The LoRA could not be saved, see below.']
  const loss = run.loss ?? []
  if (loss.length) {
    const tenth = Math.max(1, Math.floor(loss.length / 10))
    const mean = (part) => (part.reduce((sum, value) => sum + value, 0) / part.length).toFixed(4)
    lines.push(`${run.steps_done} steps, mean loss ${mean(loss.slice(0, tenth))} in the first tenth, ` +
      `${mean(loss.slice(-tenth))} in the last`)
  }
  if (run.seconds_per_step != null) lines.push(`${run.seconds_per_step} s per step`)
  if (run.compile) lines.push(`${run.graphs_compiled} graphs compiled in ${run.compile_seconds} s${backend(run)}`)
  if (run.blocks_swapped) {
    lines.push(`${run.blocks_swapped} blocks streamed, ${run.block_copies_per_step} copies in the last step`)
  }
  if (run.peak_memory_mib != null) {
    lines.push(`Peak memory of the ${run.peak_memory_of}: ${(run.peak_memory_mib / 1024).toFixed(2)} GiB`)
  }
  const previews = run.previews?.files.length
  if (previews) {
    const folder = run.path ? `: output/${run.path.replace(/[^/]*$/, 'previews')}` : ''
    lines.push(`${previews} preview${previews > 1 ? 's' : ''}${folder}`)
  }
  return [...lines, ...(run.notes ?? [])]
}

function backend(run) {
  const how = run.compile_report?.regions?.[0]?.how
  return how ? ` by ${how.backend}` : ''
}

/** The previews so far, under the lines: the file is written anew each time, under one name. The last sheet stays until
 * the next one is loaded, and one that is loaded late takes no newer one's place. */
function showPreviews(node, { filename, subfolder, type, step }) {
  const run = (node.tesseraRun ??= newRun()) // a page that was opened meanwhile has seen no beginning
  const number = ++run.sheets
  const place = new URLSearchParams({ filename, subfolder, type, step })
  const sheet = picture(api.apiURL(`/view?${place}`), `Previews up to step ${step}`, () => {
    if (node.tesseraRun !== run || run.shown > number) return
    run.shown = number
    node.tesseraSheet = sheet
    showLive(node)
  })
}

const newRun = () => ({ sheets: 0, shown: 0 })

function showLive(node) {
  show(node, [...(node.tesseraLines ?? []), node.tesseraSheet])
}

function begin(node, lines) {
  node.tesseraRun = newRun()
  node.tesseraLines = lines
  node.tesseraSheet = undefined
}

const liveLines = {
  note: ({ text }) => text,
  saved: ({ file }) => `Saved: ${file}`,
  validation: ({ step, loss }) => `Validation loss after ${step} steps: ${loss.toFixed(5)}`
}

app.registerExtension({
  name: 'tessera.reports',
  setup() {
    api.addEventListener('tessera.train', ({ detail }) => {
      const line = liveLines[detail.kind]?.(detail)
      const node = nodeAt(detail.node)
      if (!node) return
      if (detail.kind === 'preview') showPreviews(node, detail)
      if (!line) return
      node.tesseraLines = [...(node.tesseraLines ?? []), line]
      showLive(node)
    })
    api.addEventListener('tessera.compile', ({ detail }) => {
      const node = nodeAt(detail.node)
      if (node) show(node, detail.notes)
    })
  },
  beforeRegisterNodeDef(nodeType, nodeData) {
    const lines = describe[nodeData.name]
    if (!lines) return
    const { onExecuted, onExecutionStart, onNodeCreated } = nodeType.prototype
    nodeType.prototype.onNodeCreated = function (...rest) {
      const result = onNodeCreated?.apply(this, rest)
      const width = LiteGraph.NODE_TEXT_SIZE * this.title.length // a node without widgets is narrower than its title
      if (width > this.size[0]) this.setSize([width, this.size[1]])
      return result
    }
    nodeType.prototype.onExecutionStart = function (...rest) {
      onExecutionStart?.apply(this, rest)
      begin(this, [])
    }
    nodeType.prototype.onExecuted = function (output, ...rest) {
      onExecuted?.call(this, output, ...rest)
      const payloads = output?.tessera ?? []
      begin(this, this.tesseraLines) // at the end the frontend itself shows the sheet
      if (payloads.length) show(this, payloads.flatMap((payload) => lines(payload)), leastWidth[nodeData.name])
    }
  },
})
