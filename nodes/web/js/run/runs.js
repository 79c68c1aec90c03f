// Asks the server for the runs of Train LoRA and keeps their panels: a page that was reloaded, or one that did not
// queue the run, sees it as the one that did.
import { app } from '../../../../scripts/app.js'
import { api } from '../../../../scripts/api.js'
import { addComparison } from './compare_loras.js'
import { nodeAt, ourNodes } from '../common/nodes.js'
import { every } from '../common/poll.js'
import { change, previewAddress, read, RUNS_CHANGED } from './ask.js'
import { draw, makePanel } from './run_panel.js'
import { setError, setNotes, setPanel } from '../report_widget.js'
import { seat } from '../subgraph_widget.js'
import { throttle } from '../common/throttle.js'
import { sourceWidget } from '../common/widgets.js'
import { t } from '../common/words.js'

const EVERY = 2000 // milliseconds between two questions
const SOON = 1000 // after an event; the server writes once a second
const MOST_POINTS = 4000 // then the curve is asked for again, thinned
const KIND = 'TesseraTrainLora'

let queued = 0 // prompts of this server that wait or run
// By the path of each Train LoRA: its run as far as it is known, and the panels on the node and on the subgraphs around it.
const lives = new Map()

async function ask(path) {
  const answer = await api.fetchApi(path, { cache: 'no-store' })
  return answer.ok ? answer.json() : undefined
}

/** Asks something of the run that trains. Returns why it can't be met, undefined where it will be. */
async function askFor({ run }, what) {
  try {
    // ComfyUI's own button knows no prompt after a reload of the page.
    if (what === 'cancel') await api.interrupt(run.prompt_id)
    else await change(`runs/${run.id}/${what}`, { prompt_id: run.prompt_id })
    return undefined
  } catch (error) {
    return error.message
  }
}

/** The record of a node's run: what is known of it, and its panels. */
function liveOf(node, path, hosts) {
  const known = lives.get(path)
  if (known?.node === node) return Object.assign(known, { hosts })
  const live = { node, path, hosts, panels: new Map(), points: [], previews: [], sampled: '' }
  lives.set(path, live)
  return live
}

/** Brings the panels of a run up to date. One question at a time; what comes meanwhile asks again after it. */
async function refresh(live) {
  if (live.asking) {
    live.again = true
    return
  }
  live.asking = live.asked = true
  try {
    do {
      live.again = false
      await update(live)
    } while (live.again)
  } catch (error) {
    console.warn('Tessera: the run could not be asked for', error) // the server is away; the next question may be answered
  } finally {
    live.asking = false
  }
}

/** Tells whether the node's name is the run's, or that of the pair of experts which the run is one of. */
function isNamed({ node, hosts }, run) {
  const plain = (name) => name?.trim().replaceAll('\\', '/').normalize('NFC')
  const [own, name] = [plain(sourceWidget(node, 'output_name', hosts)?.value), plain(run.output_name)]
  return own === name || own === name?.replace(/_(high|low)_noise$/, '')
}

/** Tells whether a node is the Train LoRA of a run. */
export const isTrainedBy = ({ node, hosts }, run) => node.type === KIND && isNamed({ node, hosts }, run)

/** The steps that Continue raises `steps` to; none where the graph would not go on with this run. */
function furtherSteps(live, run) {
  const [steps, resume] = ['steps', 'resume'].map((name) => sourceWidget(live.node, name, live.hosts))
  const isOver = run.status === 'finished' && !run.running && run.can_go_on
  if (!isNamed(live, run)) return undefined
  const goesOn = isOver && resume?.value === 'latest' && steps && steps.value <= run.steps
  const further = run.steps + run.first_steps
  return goesOn && further <= (steps.options?.max ?? Infinity) ? further : undefined
}

/** Queues the workflow on the page with more steps, for `{node, hosts, run}`. Returns what to tell of it. */
export async function continueRun(live) {
  const to = furtherSteps(live, live.run)
  if (!to) return t('The inputs of this node have changed; press Run.')
  const steps = sourceWidget(live.node, 'steps', live.hosts)
  steps.value = to
  steps.callback?.(to)
  app.canvas.setDirty(true, true)
  const whole = await app.queuePrompt(0)
  return whole
    ? t('Queued, up to step {to}.', { to })
    : t('steps is {to} now, but not all of the workflow was queued; press Run.', { to })
}

async function copyName({ run }) {
  try {
    await navigator.clipboard.writeText(run.lora)
    return t('Copied: {name}', { name: run.lora })
  } catch {
    return t('The browser allows copying only over https or on the machine of the server. The name is {name}', { name: run.lora })
  }
}

/** The newest run of the node's name. */
async function newestOf({ node, hosts }) {
  const name = sourceWidget(node, 'output_name', hosts)?.value
  return name && (await ask(`/tessera/runs?name=${encodeURIComponent(name)}`))?.runs[0]
}

const places = ({ node, hosts }) => [node, ...hosts]

/** Tells whether the node is still in the open workflow: one that is gone must get no widget. */
const isOpen = (live) => nodeAt(live.path) === live.node

async function update(live) {
  // A run in training is asked for by itself: its name may be changed on the node meanwhile.
  const newest = live.run?.running ? { id: live.id } : await newestOf(live)
  if (!isOpen(live)) return
  if (!newest) {
    Object.assign(live, { id: undefined, run: undefined, points: [], previews: [], sampled: '' })
    removePanels(live)
    tellFailure(live)
    setNotes(live.node, [])
    return
  }
  const last = () => live.points.at(-1)?.[0] ?? 0
  if (newest.id !== live.id || live.points.length > MOST_POINTS) Object.assign(live, { id: newest.id, points: [], sampled: '' })
  let run = await ask(`/tessera/runs/${newest.id}?since=${last()}`)
  if (run && live.points.length && (run.started !== live.run?.started || run.step < last())) {
    live.points = []
    run = await ask(`/tessera/runs/${newest.id}?since=0`)
  }
  if (!run) { // its folder is gone, or the server was restarted and knows no run before it has listed it
    live.again ||= Boolean(live.run?.running)
    live.run = undefined
    return
  }
  live.run = run
  live.points.push(...run.loss)
  await updatePreviews(live)
  if (!isOpen(live)) return
  for (const place of places(live)) drawOn(place, live)
  tellFailure(live)
  setNotes(live.node, run.notes)
}

/** Shows why the run failed; takes the sentence away where there is another run by now, or none. */
function tellFailure(live) {
  const { run } = live
  const failure = run?.status === 'failed' ? run.text : ''
  const failed = failure && `${run.id} ${run.started}`
  if (failed !== (live.failed ?? '')) for (const place of places(live)) setError(place, failure)
  live.failed = failed // told once: queueing again takes the sentence away before the next run begins
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

/** Draws a run's panel on a node. */
function drawOn(place, live) {
  const before = live.panels.get(place)
  const panel = before ?? makePanel(
    (what) => askFor(live, what),
    { copy: () => copyName(live), compare: () => compareSaves(place, live), goOn: () => continueRun(live) },
    previewAddress,
  )
  const height = panel.dataset.height
  draw(panel, live.run, live.points, live.previews, furtherSteps(live, live.run))
  live.panels.set(place, panel)
  if (!before || height !== panel.dataset.height) setPanel(place, live.path, panel)
}

function removePanels({ path, panels }, isGone = () => true) {
  for (const place of [...panels.keys()].filter(isGone)) {
    setPanel(place, path, undefined)
    panels.delete(place)
  }
}

/** Puts a Compare LoRAs with the run's saves into the graph. Returns what to tell of it. */
export async function compareSaves(place, { id }) {
  const { loras } = await read(`runs/${id}/saves`)
  return loras.length ? addComparison(place, loras) : t('The saves of this run no longer exist.')
}

function refreshAll(isDue) {
  const there = new Set()
  for (const [node, path, hosts] of ourNodes()) {
    if (node.type !== KIND) continue
    there.add(path)
    const live = liveOf(node, path, hosts)
    removePanels(live, (place) => !places(live).includes(place)) // the node was put into a subgraph, or out of one
    if (isDue(live)) refresh(live)
    hosts.forEach(seat)
  }
  for (const [path, live] of lives) {
    if (there.has(path)) continue
    removePanels(live)
    lives.delete(path)
  }
}

const isDue = ({ run, asked }) => queued || !asked || run?.running
const visible = () => document.visibilityState === 'visible'

app.registerExtension({
  name: 'tessera.runs',
  async setup() {
    api.addEventListener('status', ({ detail }) => {
      const before = queued
      queued = detail?.exec_info?.queue_remaining ?? 0
      if (before && !queued && visible()) refreshAll(() => true) // the end of what ran last
    })
    api.addEventListener('tessera.train', throttle(SOON, () => visible() && refreshAll(() => true)))
    window.addEventListener(RUNS_CHANGED, () => refreshAll(() => true))
    document.addEventListener('visibilitychange', () => visible() && refreshAll(() => true))
    every(EVERY, () => refreshAll(isDue))
    queued = (await ask('/prompt'))?.exec_info?.queue_remaining ?? 0 // its first message came before this
  },
  afterConfigureGraph() {
    refreshAll(() => true)
  },
})
