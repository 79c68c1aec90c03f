// Shows on Tessera's nodes what they say of themselves: notes and saved files while they run, a summary at the end.
// The state of a run, its step and its previews stand in its panel alone (run/run_panel.js).
import { app } from '../../../scripts/app.js'
import { api } from '../../../scripts/api.js'
import { TABLE_WIDTH, describeCompiling } from './compile_report.js'
import { isElsewhere, nodeAt, ourNodes } from './common/nodes.js'
import { monospaced, show } from './report_widget.js'
import { describeCheck } from './review/check_folder.js'
import { describeEstimate } from './run/estimate.js'
import { stateOf } from './common/state.js'
import { widgetOf } from './common/widgets.js'
import { t } from './common/words.js'

const describe = {
  TesseraPrepareDataset: ({ summary }) => [summary],
  TesseraLatentsToDataset: ({ pictures, notes = [] }) => [t('{count} pictures', { count: pictures }), ...notes],
  TesseraSlider: ({ notes }) => notes,
  TesseraPictureSlider: ({ notes }) => notes,
  TesseraEraseConcept: ({ notes }) => notes,
  TesseraCheckFolder: describeCheck,
  TesseraCaptionFolder: ({ summary, notes = [] }) => [summary, ...notes],
  TesseraMaskFolder: ({ report }) => [report],
  TesseraLoraNetwork: ({ text }) => [monospaced(text)],
  TesseraTrainLora: describeRun,
  TesseraTrainingEstimate: describeEstimate,
  TesseraSaveLora: ({ filename, subfolder, format, dtype, is_new: isNew, notes = [] }) => {
    const values = { file: `output/${subfolder ? `${subfolder}/` : ''}${filename}` }
    return [isNew ? t('Saved: {file}', values) : t('Saved before: {file}', values), `${format}, ${dtype}`, ...notes]
  },
  TesseraLoadLora: ({ notes }) => notes,
  TesseraMergeLoras: ({ notes }) => notes,
  TesseraResizeLora: ({ notes }) => notes,
  TesseraExtractLora: ({ notes }) => notes,
  TesseraCompareLoras: ({ notes = [] }) => notes,
  TesseraLoadDiffusionModel: ({ notes }) => notes,
  TesseraBlockSwap: ({ notes }) => notes,
  TesseraCompileModel: ({ notes }) => notes,
  TesseraCompileReport: describeCompiling,
  TesseraTuneCompile: ({ text }) => [monospaced(text)],
}

const leastWidth = {
  TesseraTrainingEstimate: TABLE_WIDTH, TesseraLoraNetwork: TABLE_WIDTH, TesseraCompileReport: TABLE_WIDTH, TesseraTuneCompile: TABLE_WIDTH,
}

const TRAIN = 'TesseraTrainLora'
const PROGRESS_TEXT = '$$node-text-preview' // the frontend's name of the widget
const MOST_LINES = 100 // of a run, while it runs

function describeRun(run, node) {
  if (run.estimate) return describeEstimate(run, node)
  const lines = [run.path ? t('Saved: {file}', { file: `output/${run.path}` }) : t('The LoRA could not be saved, see below.')]
  if (run.compile) {
    const values = { graphs: run.graphs_compiled, seconds: run.compile_seconds, backend: run.compile_report?.regions?.[0]?.how?.backend }
    lines.push(values.backend
      ? t('{graphs} graphs compiled in {seconds} s by {backend}', values)
      : t('{graphs} graphs compiled in {seconds} s', values))
  }
  if (run.blocks_swapped) {
    const values = { blocks: run.blocks_swapped, copies: run.block_copies_per_step }
    lines.push(t('{blocks} blocks streamed, {copies} copies in the last step', values))
  }
  if (run.peak_memory_mib != null) {
    const values = { memory: run.peak_memory_of, size: (run.peak_memory_mib / 1024).toFixed(2) }
    lines.push(t('Peak memory of the {memory}: {size} GiB', values))
  }
  return [...lines, ...(run.notes ?? [])]
}

/** The lines so far; those of the run's record on a page that has seen no beginning. */
const linesOf = (node) => stateOf(node).lines ?? stateOf(node).notes ?? []

/** Takes away ComfyUI's own line of progress, which would go on telling what a run did last. */
function removeProgressText(node) {
  const shown = widgetOf(node, PROGRESS_TEXT)
  if (shown) node.removeWidget(shown)
}

const liveLines = {
  note: ({ text }) => text,
  saved: ({ file }) => t('Saved: {file}', { file }),
  validation: ({ step, loss }) => t('Validation loss after {step} steps: {loss}', { step, loss: loss.toFixed(5) })
}

app.registerExtension({
  name: 'tessera.reports',
  setup() {
    api.addEventListener('tessera.train', ({ detail }) => {
      const line = liveLines[detail.kind]?.(detail)
      const node = nodeAt(detail.node)
      if (!node || isElsewhere(detail.prompt_id)) return
      if (detail.kind === 'begin') removeProgressText(node) // from here on the panel says it
      if (!line || linesOf(node).includes(line)) return
      stateOf(node).lines = [...linesOf(node), line].slice(-MOST_LINES) // the summary at the end has all notes
      show(node, linesOf(node))
    })
    api.addEventListener('execution_start', ({ detail }) => {
      if (isElsewhere(detail.prompt_id)) return
      for (const [node] of ourNodes()) if (node.type === TRAIN) show(node, []) // the lines are of an earlier run
    })
    for (const end of ['execution_success', 'execution_error', 'execution_interrupted']) {
      api.addEventListener(end, () => {
        for (const [node] of ourNodes()) if (node.type === TRAIN) removeProgressText(node)
      })
    }
    api.addEventListener('tessera.compile', ({ detail }) => {
      const node = nodeAt(detail.node)
      if (node && !isElsewhere(detail.prompt_id)) show(node, detail.notes)
    })
  },
  beforeRegisterNodeDef(nodeType, nodeData) {
    const lines = describe[nodeData.name]
    if (!lines) return
    const prototype = /** @type {any} */ (nodeType.prototype) // the frontend calls these, and its types leave them out
    const { onExecuted, onExecutionStart, onNodeCreated } = prototype
    prototype.onNodeCreated = function (...rest) {
      const result = onNodeCreated?.apply(this, rest)
      const width = LiteGraph.NODE_TEXT_SIZE * this.title.length // a node without widgets is narrower than its title
      if (width > this.size[0]) this.setSize([width, this.size[1]])
      if (nodeData.name === TRAIN) Object.assign(this, { hideOutputImages: true }) // the panel shows the previews one by one
      return result
    }
    prototype.onExecutionStart = function (...rest) {
      onExecutionStart?.apply(this, rest)
      stateOf(this).lines = []
    }
    prototype.onExecuted = function (output, ...rest) {
      onExecuted?.call(this, output, ...rest)
      if (isElsewhere()) return
      const payloads = output?.tessera ?? []
      if (payloads.length) show(this, payloads.flatMap((payload) => lines(payload, this)), leastWidth[nodeData.name])
    }
  },
})
