// Shows on Tessera's nodes what they say of themselves: notes and saved files while they run, a summary at the end.
// The phase and the step stand in ComfyUI's own progress text.
import { app } from '../../../scripts/app.js'
import { api } from '../../../scripts/api.js'
import { TABLE_WIDTH, describeCompiling } from './compile_report.js'
import { isElsewhere, nodeAt } from './common/nodes.js'
import { monospaced, picture, show } from './report_widget.js'
import { describeCheck } from './review/check_folder.js'
import { stateOf } from './common/state.js'
import { t } from './common/words.js'

const describe = {
  TesseraPrepareDataset: ({ summary }) => [summary],
  TesseraLatentsToDataset: ({ pictures, notes = [] }) => [t('{count} pictures', { count: pictures }), ...notes],
  TesseraCheckFolder: describeCheck,
  TesseraCaptionFolder: ({ summary, notes = [] }) => [summary, ...notes],
  TesseraMaskFolder: ({ report }) => [report],
  TesseraLoraNetwork: ({ text }) => [monospaced(text)],
  TesseraTrainLora: describeRun,
  TesseraSaveLora: ({ filename, subfolder, format, dtype, is_new: isNew, notes = [] }) => {
    const values = { file: `output/${subfolder ? `${subfolder}/` : ''}${filename}` }
    return [isNew ? t('Saved: {file}', values) : t('Saved before: {file}', values), `${format}, ${dtype}`, ...notes]
  },
  TesseraLoadLora: ({ notes }) => notes,
  TesseraCompareLoras: ({ notes = [] }) => notes,
  TesseraLoadDiffusionModel: ({ notes }) => notes,
  TesseraBlockSwap: ({ notes }) => notes,
  TesseraCompileModel: ({ notes }) => notes,
  TesseraCompileReport: describeCompiling,
  TesseraTuneCompile: ({ text }) => [monospaced(text)],
}

const leastWidth = { TesseraLoraNetwork: TABLE_WIDTH, TesseraCompileReport: TABLE_WIDTH, TesseraTuneCompile: TABLE_WIDTH }

const MOST_LINES = 100 // of a run, while it runs

function describeRun(run) {
  const lines = [run.path ? t('Saved: {file}', { file: `output/${run.path}` }) : t('The LoRA could not be saved, see below.')]
  const loss = run.loss ?? []
  if (loss.length) {
    const tenth = Math.max(1, Math.floor(loss.length / 10))
    const mean = (part) => (part.reduce((sum, value) => sum + value, 0) / part.length).toFixed(4)
    const values = { steps: run.steps_done, first: mean(loss.slice(0, tenth)), last: mean(loss.slice(-tenth)) }
    lines.push(t('{steps} steps, mean loss {first} in the first tenth, {last} in the last', values))
  }
  if (run.seconds_per_step != null) lines.push(t('{seconds} s per step', { seconds: run.seconds_per_step }))
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
  const previews = run.previews?.files.length
  if (previews) {
    const folder = run.path ? `: output/${run.path.replace(/[^/]*$/, 'previews')}` : ''
    lines.push(`${previews > 1 ? t('{count} previews', { count: previews }) : t('1 preview')}${folder}`)
  }
  return [...lines, ...(run.notes ?? [])]
}

/** The previews so far, under the lines: the file is written anew each time, under one name. The last sheet stays until
 * the next one is loaded, and one that is loaded late takes no newer one's place. */
function showPreviews(node, { filename, subfolder, type, step }) {
  const state = stateOf(node)
  const run = (state.run ??= newRun()) // a page that was opened meanwhile has seen no beginning
  const number = ++run.sheets
  const place = new URLSearchParams({ filename, subfolder, type, step })
  const sheet = picture(api.apiURL(`/view?${place}`), t('Previews up to step {step}', { step }), () => {
    if (state.run !== run || run.shown > number) return
    run.shown = number
    state.sheet = sheet
    showLive(node)
  })
}

const newRun = () => ({ sheets: 0, shown: 0 })

/** The lines so far; those of the run's record on a page that has seen no beginning. */
const linesOf = (node) => stateOf(node).lines ?? stateOf(node).notes ?? []

function showLive(node) {
  show(node, [...linesOf(node), stateOf(node).sheet])
}

function begin(node, lines) {
  Object.assign(stateOf(node), { run: newRun(), lines, sheet: undefined })
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
      if (detail.kind === 'preview') showPreviews(node, detail)
      if (!line || linesOf(node).includes(line)) return
      stateOf(node).lines = [...linesOf(node), line].slice(-MOST_LINES) // the summary at the end has all notes
      showLive(node)
    })
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
      return result
    }
    prototype.onExecutionStart = function (...rest) {
      onExecutionStart?.apply(this, rest)
      begin(this, [])
    }
    prototype.onExecuted = function (output, ...rest) {
      onExecuted?.call(this, output, ...rest)
      if (isElsewhere()) return
      const payloads = output?.tessera ?? []
      begin(this, stateOf(this).lines) // at the end the frontend itself shows the sheet
      if (payloads.length) show(this, payloads.flatMap((payload) => lines(payload)), leastWidth[nodeData.name])
    }
  },
})
