// Asks the server for the runs of Train LoRA and keeps their panels: a page that was reloaded, or one that did not
// queue the run, sees it as the one that did.
import { app } from '../../../../scripts/app.js'
import { api } from '../../../../scripts/api.js'
import { addComparison } from '../compare_loras.js'
import { ourNodes } from '../nodes.js'
import { draw, makePanel } from './run_panel.js'
import { setError, setPanel } from '../report_widget.js'
import { ownWidget } from '../widgets.js'

const EVERY = 2000 // milliseconds between two questions
const SOON = 1000 // after an event; the server writes once a second
const MOST_POINTS = 4000 // then the curve is asked for again, thinned
const KIND = 'TesseraTrainLora'

let queued = 0 // prompts of this server that wait or run

async function ask(path) {
  const answer = await api.fetchApi(path, { cache: 'no-store' })
  return answer.ok ? answer.json() : undefined
}

/** Asks something of the run that trains. Returns why it can't be met, undefined where it will be. */
async function askFor({ run }, what) {
  try {
    const answer = await api.fetchApi(`/tessera/runs/${run.id}/${what}`, {
      method: 'POST',
      headers: { 'Content-Type': 'application/json' },
      body: JSON.stringify({ prompt_id: run.prompt_id }),
    })
    return answer.ok ? undefined : (await answer.json()).error
  } catch {
    return 'The server does not answer.'
  }
}

/** Brings a node's panel up to date. One question at a time; what comes meanwhile asks again after it. */
export async function refresh(node) {
  const live = (node.tesseraLive ??= { points: [], previews: [], sampled: '' })
  if (live.asking) {
    live.again = true
    return
  }
  live.asking = true
  try {
    do {
      live.again = false
      await update(node, live)
    } while (live.again)
  } catch (error) {
    console.warn('Tessera: the run could not be asked for', error) // the server is away; the next question may be answered
  } finally {
    live.asking = false
  }
}

/** Tells whether the node's name is the run's, or that of the pair of experts which the run is one of. */
function isNamed(node, run) {
  const plain = (name) => name?.trim().replaceAll('\\', '/').normalize('NFC')
  const [own, name] = [plain(ownWidget(node, 'output_name')?.value), plain(run.output_name)]
  return own === name || own === name?.replace(/_(high|low)_noise$/, '')
}

/** The steps that Continue raises `steps` to; none where the graph would not go on with this run. */
function furtherSteps(node, run) {
  const [steps, resume] = [ownWidget(node, 'steps'), ownWidget(node, 'resume')]
  const isOver = run.status === 'finished' && !run.running && run.can_go_on
  if (!isNamed(node, run)) return undefined
  const goesOn = isOver && resume?.value === 'latest' && steps && steps.value <= run.steps
  const further = run.steps + run.first_steps
  return goesOn && further <= (steps.options?.max ?? Infinity) ? further : undefined
}

/** Queues the workflow on the page with more steps. Returns what to tell of it. */
async function goOn(node, { run }) {
  const to = furtherSteps(node, run)
  if (!to) return 'The inputs of this node have changed; press Run.'
  const steps = ownWidget(node, 'steps')
  steps.value = to
  steps.callback?.(to)
  node.graph?.setDirtyCanvas(true, true)
  const whole = await app.queuePrompt(0)
  return whole ? `Queued, up to step ${to}.` : `steps is ${to} now, but not all of the workflow was queued; press Run.`
}

async function copyName({ run }) {
  try {
    await navigator.clipboard.writeText(run.lora)
    return `Copied: ${run.lora}`
  } catch {
    return `The browser lets a page copy under https and on its own machine only. The name is ${run.lora}`
  }
}

/** The newest run of the node's name. */
async function newestOf(node) {
  const name = ownWidget(node, 'output_name')?.value
  return name && (await ask(`/tessera/runs?name=${encodeURIComponent(name)}`))?.runs[0]
}

async function update(node, live) {
  // A run in training is asked for by itself: its name may be changed on the node meanwhile.
  const newest = live.run?.running ? { id: live.id } : await newestOf(node)
  if (!newest) {
    Object.assign(live, { id: undefined, run: undefined, points: [], previews: [], sampled: '' })
    if (node.tesseraPanel) setPanel(node, undefined)
    return
  }
  const last = () => live.points.at(-1)?.[0] ?? 0
  if (newest.id !== live.id || live.points.length > MOST_POINTS) Object.assign(live, { id: newest.id, points: [], sampled: '' })
  let run = await ask(`/tessera/runs/${newest.id}?since=${last()}`)
  if (run && live.points.length && (run.started !== live.run?.started || run.step < last())) {
    live.points = []
    run = await ask(`/tessera/runs/${newest.id}?since=0`)
  }
  if (!run) {
    live.run = undefined // its folder is gone
    return
  }
  live.run = run
  live.points.push(...run.loss)
  await updatePreviews(live)
  drawOn(node, live)
  const failure = run.status === 'failed' ? run.text : ''
  if (failure && live.failed !== run.started) setError(node, failure)
  else if (!failure && live.failed) setError(node, '')
  live.failed = failure && run.started // told once: queueing again takes the sentence away before the next run begins
}

/** Lists the previews again where there are others by now. */
async function updatePreviews(live) {
  const sampled = `${live.id} ${live.run.started} ${live.run.previews}`
  if (sampled === live.sampled) return
  const listed = live.run.previews.length ? (await ask(`/tessera/runs/${live.id}/previews`))?.previews : []
  if (!listed) return
  const { id } = live // which a preview that is open large keeps
  live.previews = listed
    .filter(({ step }) => live.run.previews.includes(step)) // not those of steps that were given up
    .map((preview) => ({ ...preview, id }))
  live.sampled = sampled
}

/** Draws a run's panel on its node. */
function drawOn(node, live) {
  const before = node.tesseraPanel
  const panel = before ?? makePanel(
    (what) => askFor(live, what),
    { copy: () => copyName(live), compare: () => compareSaves(node, live), goOn: () => goOn(node, live) },
    ({ id, step, row, changed }, small) =>
      api.apiURL(`/tessera/runs/${id}/previews/${step}/${row}?v=${changed}${small ? '&small=1' : ''}`),
  )
  const height = panel.dataset.height
  draw(panel, live.run, live.points, live.previews, furtherSteps(node, live.run))
  if (!before || height !== panel.dataset.height) setPanel(node, panel)
}

/** Puts a Compare LoRAs with the run's saves into the graph. Returns what to tell of it. */
async function compareSaves(node, { id }) {
  const { loras = [] } = (await ask(`/tessera/runs/${id}/saves`)) ?? {}
  return loras.length ? addComparison(node, loras) : 'The saves of this run are not there any more.'
}

function refreshAll(isDue) {
  for (const [node] of ourNodes()) if (node.type === KIND && isDue(node)) refresh(node)
}

const isDue = ({ tesseraLive }) => queued || !tesseraLive || tesseraLive.run?.running
const visible = () => document.visibilityState === 'visible'
let soon

app.registerExtension({
  name: 'tessera.runs',
  async setup() {
    api.addEventListener('status', ({ detail }) => {
      const before = queued
      queued = detail?.exec_info?.queue_remaining ?? 0
      if (before && !queued && visible()) refreshAll(() => true) // the end of what ran last
    })
    api.addEventListener('tessera.train', () => {
      soon ??= setTimeout(() => {
        soon = undefined
        if (visible()) refreshAll(() => true)
      }, SOON)
    })
    document.addEventListener('visibilitychange', () => visible() && refreshAll(() => true))
    setInterval(() => visible() && refreshAll(isDue), EVERY)
    queued = (await ask('/prompt'))?.exec_info?.queue_remaining ?? 0 // its first message came before this
  },
  afterConfigureGraph() {
    refreshAll(() => true)
  },
})
