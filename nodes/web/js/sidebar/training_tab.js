// The sidebar tab Training: all runs of the server.
import { app } from '../../../../scripts/app.js'
import { api } from '../../../../scripts/api.js'
import { button, part } from '../common/elements.js'
import { change, read } from '../run/ask.js'
import { compareSaves, continueRun, isTrainedBy } from '../run/runs.js'
import { ourNodes } from '../common/nodes.js'
import { every } from '../common/poll.js'
import { throttle } from '../common/throttle.js'
import { COLOURS, drawChart, makeChart } from './chart.js'
import { deletion, makeTrash } from './deletion.js'
import { keepFocus } from './focus.js'
import { loadLine, makeLine } from './line.js'
import { addLoader, middle, takeDrops } from './lora_drop.js'
import { makeNewRun } from './new_run.js'
import { drawDetail, drawPreview, drawRow, makeRow } from './run_row.js'
import { t, translations } from '../common/words.js'
import { WORDS } from './sentences.js'
import { openReport } from './run_report.js'
import { sentence, statusPlace } from './status.js'

const EVERY = 2000 // milliseconds between two looks at what trains
const SOON = 1000 // after an event; the server writes once a second
const TYPING = 200
const SPARKLINE = 60 // points
const AT_ONCE = 3 // questions for rows; a browser has six connections to a server, and others need some

// Kept while the tab is closed.
const runs = new Map() // those that are listed, by id
const chosen = new Map() // in the chart: name, colour and points, by id
let filter = ''
let off = '' // why runs can't be deleted
let view // what is on the page; none while the tab is closed

const visible = () => view && document.visibilityState === 'visible'

function build(host) {
  const root = part(host, 'tessera-runs', 'div', { tabIndex: -1 }) // takes the focus where nothing else is left
  root.addEventListener('keydown', pressed)
  const head = part(root, 'tessera-runs-head')
  part(head, '', 'h2', { textContent: t(WORDS.title) })
  makeNewRun(head, { attempt, tell })
  const search = part(head, '', 'input', { type: 'search', placeholder: t(WORDS.filter), value: filter })
  search.setAttribute('aria-label', t(WORDS.filter))
  let typing
  let isLeft = true
  search.addEventListener('blur', () => (isLeft = true))
  for (const event of ['pointerdown', 'keydown']) search.addEventListener(event, () => (isLeft = false))
  search.addEventListener('input', ({ inputType }) => {
    if (isLeft && inputType?.startsWith('history')) { // Ctrl+Z on the graph, which Chromium takes for one of this text
      search.value = filter
      search.blur()
      return
    }
    clearTimeout(typing)
    typing = setTimeout(() => {
      filter = search.value
      if (view?.root === root) load(1) // the tab may be closed by now
    }, TYPING)
  })
  const count = part(head, 'tessera-aside')
  const [said, gone] = [statusPlace(root), statusPlace(root)]
  const chart = makeChart(root, {
    clear: () => [...chosen.keys()].forEach(takeOut),
    remove: takeOut,
    compare: () => openReport([...chosen.keys()]),
  })
  const line = makeLine(root, attempt)
  const list = part(root, 'tessera-runs-list')
  list.setAttribute('role', 'list')
  list.setAttribute('aria-label', t(WORDS.tooltip))
  const foot = part(list, 'tessera-runs-foot')
  const trash = makeTrash(root)
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) Object.assign(target, { isSeen: isIntersecting })
    askForSeen()
  }, { root: list, rootMargin: '200px' })
  return { host, root, count, said, gone, chart, line, list, foot, trash, watch, rows: new Map(), pages: 1, asked: 0, asking: 0 }
}

/** Shows a sentence above the list. */
function tell(text, isError = false) {
  if (!view) return
  sentence(view.said, text, isError ? 'var(--error-text)' : '')
  view.isUnlisted = false
}

/** Does what may fail, and shows why it did. */
async function attempt(does) {
  try {
    await does()
  } catch (error) {
    tell(error.message, true)
  }
}

const deletions = deletion({ place: () => view?.gone, trash: () => view?.trash, attempt, tell, takeOut, load })

/** Lists the runs again, with so many pages. What is answered late takes no newer answer's place. */
async function load(pages = view.pages) {
  const now = view
  const number = ++now.asked
  const isLate = () => now !== view || number !== now.asked
  try {
    const found = []
    let last
    do {
      last = await read(`runs?filter=${encodeURIComponent(filter)}&page=${found.length}`)
      if (isLate()) return
      found.push(last)
    } while (found.length < Math.min(pages, last.pages))
    off = (await read('deleting')).off
    if (isLate()) return
    now.pages = pages
    const order = [...now.list.children]
    const at = order.findIndex((row) => row.contains(document.activeElement))
    const nearest = () => [...order.slice(at), ...order.slice(0, at).reverse()].find((row) => row.dataset.run && row.isConnected)
    keepFocus(now.root, () => show(new Map(found.flatMap((page) => page.runs.map((run) => [run.id, run]))), last), nearest)
    if (now.isUnlisted) tell('')
    await deletions.drawTrash(off)
    if (now === view) await loadLine(now.line)
  } catch (error) {
    if (isLate()) return
    tell(error.message, true)
    now.isUnlisted = true // until it is listed again
  }
}

function show(found, { count, page, pages }) {
  const { rows, list, foot, watch } = view
  for (const [id, row] of rows) {
    if (found.has(id)) continue
    watch.unobserve(row)
    row.remove()
    rows.delete(id)
  }
  runs.clear()
  for (const [id, run] of found) {
    runs.set(id, run)
    const row = rows.get(id) ?? newRow(id)
    if (row.isOf !== `${run.changed} ${run.running}`) {
      row.isOld = true
      if (chosen.has(id)) extend(id).catch(() => {}) // deleted meanwhile
    }
    row.isOf = `${run.changed} ${run.running}`
    drawRow(row, run, off, chosen.get(id)?.colour)
  }
  const wanted = [...found.keys()].map((id) => rows.get(id))
  if (wanted.some((row, at) => list.children[at] !== row)) list.replaceChildren(...wanted, foot)
  view.count.textContent = count === 1 ? t(WORDS.one) : t(WORDS.count, { count: count.toLocaleString() })
  foot.replaceChildren()
  if (!count) foot.textContent = filter.trim() ? t(WORDS.noneFound, { filter: filter.trim() }) : t(WORDS.none)
  const rest = count - found.size
  if (page + 1 < pages) button(foot, t(WORDS.more, { count: rest.toLocaleString() }), '', () => load(page + 2))
  askForSeen()
}

function newRow(id) {
  const row = makeRow({
    id,
    choose: (isIn) => (isIn ? putIn(id) : takeOut(id)),
    open: () => attempt(() => openWorkflow(id)),
    report: () => showReport(id, row.detail),
    add: () => attempt(() => addLora(id, middle())),
    pause: () => attempt(() => pause(id, row.detail)),
    goOn: () => attempt(() => goOn(id, row.detail)),
    remove: () => attempt(() => deletions.remove(id)),
    canAdd: () => Boolean(row.detail?.last_lora),
  })
  view.rows.set(id, row)
  view.watch.observe(row)
  return row
}

/** Asks for the state and the curve of rows that are seen and have changed. */
function askForSeen() {
  for (const [id, row] of view?.rows ?? []) {
    if (view.asking >= AT_ONCE) return
    if (!row.isSeen || !row.isOld || row.isAsked) continue
    row.isOld = false
    row.isAsked = true
    const now = view
    now.asking += 1
    askFor(id, row).catch(() => { // deleted meanwhile, or the server is away
      row.isOf = '' // asked for again when the list is
    }).finally(() => {
      row.isAsked = false
      now.asking -= 1
      if (now === view) askForSeen()
    })
  }
}

async function askFor(id, row) {
  const wasRunning = row.detail?.running
  const detail = await read(`runs/${id}?points=${SPARKLINE}`)
  row.detail = detail
  drawDetail(row, detail, chosen.get(id)?.colour)
  if (wasRunning && !detail.running && view) load()
  const step = detail.previews.at(-1)
  const sampled = `${detail.started} ${step}`
  if (row.sampled === sampled) return
  const { previews } = step === undefined ? { previews: [] } : await read(`runs/${id}/previews?last=1`)
  row.sampled = sampled
  drawPreview(row, previews[0])
}

async function putIn(id) {
  const run = runs.get(id)
  const taken = new Set([...chosen.values()].map(({ colour }) => colour))
  const colour = COLOURS.find((each) => !taken.has(each))
  if (!colour) tell(t(WORDS.most, { count: COLOURS.length }), true)
  else if (run) chosen.set(id, { name: run.folder, colour, points: [] })
  drawChosen(id)
  if (colour) await attempt(() => extend(id))
}

function takeOut(id) {
  chosen.delete(id)
  drawChosen(id)
}

/** Reads the curve of a chosen run. */
async function extend(id) {
  const { loss } = await read(`runs/${id}`)
  const now = chosen.get(id)
  if (now) now.points = loss
  drawChosen(id)
}

function drawChosen(id) {
  if (!view) return
  const row = view.rows.get(id)
  keepFocus(view.root, () => drawChart(view.chart, [...chosen].map(([run, each]) => ({ id: run, ...each }))), () => row)
  if (!row || !runs.has(id)) return
  drawRow(row, runs.get(id), off, chosen.get(id)?.colour)
  if (row.detail) drawDetail(row, row.detail, chosen.get(id)?.colour)
}

async function openWorkflow(id) {
  const name = runs.get(id).folder.split('/').at(-1)
  const { workflow, prompt } = await read(`runs/${id}/workflow`)
  if (workflow) await app.loadGraphData(workflow, true, true, name)
  else app.loadApiJson(prompt, name)
}

/** Shows the report of a run, with what can be done with it. */
function showReport(id, detail) {
  const compare = ({ node, run }) => compareSaves(node, run)
  const actions = [
    { text: t(WORDS.continueRun), isOn: detail?.can_go_on, does: () => inWorkflow(id, continueRun) },
    { text: t(WORDS.compareSaves), isOn: detail?.last_lora, does: () => inWorkflow(id, compare) },
    { text: t(WORDS.useHere), isOn: detail?.last_lora, does: () => addLora(id, middle()) },
  ]
  const offered = actions.filter(({ isOn }) => isOn && !detail.running)
  openReport([id], offered.map(({ text, does }) => ({ text, does: () => attempt(does) })))
}

/** Opens the workflow of a run and does something with its Train LoRA there, which tells what came of it. */
async function inWorkflow(id, does) {
  const run = await read(`runs/${id}?points=3`)
  await openWorkflow(id)
  const found = [...ourNodes()].map(([node, , hosts]) => ({ node, hosts, run })).find((place) => isTrainedBy(place, run))
  tell(found ? await does(found) : t(WORDS.noTrainNode), !found)
}

async function pause(id, { prompt_id }) {
  await change(`runs/${id}/pause`, { prompt_id })
  tell(t(WORDS.pausing, { name: runs.get(id).folder }))
}

/** Queues a paused run again: the prompt that the server holds or, after its restart, the one beside the LoRA. */
async function goOn(id, { prompt_id }) {
  const { folder } = runs.get(id)
  try {
    await change('go_on', { prompt_id })
  } catch (error) {
    if (error.status !== 409) throw error
    const [{ prompt }, { workflow }] = await Promise.all(
      ['workflow?prompt=1', 'workflow'].map((path) => read(`runs/${id}/${path}`)),
    )
    await api.queuePrompt(0, { output: prompt, workflow })
  }
  tell(t(WORDS.queued, { name: folder }))
}

async function addLora(id, at) {
  const lora = (await read(`runs/${id}?points=3`)).last_lora
  tell(lora ? addLoader(lora, at) : t(WORDS.noLora), !lora)
}

/** Arrows go along the runs. No key reaches the graph, where some delete nodes. */
function pressed(event) {
  if (!event.ctrlKey && !event.metaKey && event.key !== 'Escape') event.stopPropagation()
  const row = event.target.closest('.tessera-runs-row')
  const to = { ArrowDown: row?.nextElementSibling, ArrowUp: row?.previousElementSibling }[event.key]
  if (event.target !== row || !to?.dataset.run) return
  event.preventDefault()
  to.focus()
}

function lookAtRunning() {
  if (!view) return
  for (const [id, row] of view.rows) if (row.detail?.running || runs.get(id)?.running) row.isOld = true
  askForSeen()
  for (const id of chosen.keys()) if (runs.get(id)?.running) extend(id).catch(() => {}) // asked again soon
}

const reloadSoon = throttle(SOON, () => visible() && load())

app.registerExtension({
  name: 'tessera.training',
  async setup() {
    await translations()
    app.extensionManager?.registerSidebarTab?.({
      id: 'tessera.training',
      icon: 'pi pi-chart-line',
      title: t(WORDS.title),
      tooltip: t(WORDS.tooltip),
      type: 'custom',
      render(host) { // called again whenever the frontend draws its frame
        if (view?.host === host && host.contains(view.root)) return
        view?.watch.disconnect()
        host.style.height = '100%'
        view = build(host)
        drawChosen()
        deletions.draw()
        load(1)
      },
      destroy() {
        view?.watch.disconnect()
        view?.root.remove()
        view = undefined
      },
    })
    takeDrops((id, at) => runs.has(id) && attempt(() => addLora(id, at)))
    api.addEventListener('status', reloadSoon)
    api.addEventListener('tessera.train', ({ detail }) => ['begin', 'end'].includes(detail.kind) && reloadSoon())
    document.addEventListener('visibilitychange', reloadSoon)
    every(EVERY, lookAtRunning)
  },
})
