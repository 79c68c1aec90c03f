// Deletion of runs: the run that was deleted last with a way back, and the trash that holds all that were deleted.
import { app } from '../../../../scripts/app.js'
import { button, enable, part } from '../common/elements.js'
import { change, read, RUNS_CHANGED } from '../run/ask.js'
import { keepFocus } from './focus.js'
import { t } from '../common/words.js'
import { WORDS } from './sentences.js'
import { sentence } from './status.js'

const deleted = [] // that can be brought back: id, folder and what to tell of each, the last one at the end

const size = (bytes) => (bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(1)} GB`)

/** The trash, closed at first. */
export function makeTrash(parent) {
  const box = part(parent, 'tessera-runs-trash', 'details')
  box.style.display = 'none'
  const summary = part(box, '', 'summary')
  const list = part(box, 'tessera-trash-list')
  const foot = part(box, 'tessera-trash-foot')
  return Object.assign(box, { parts: { summary, list, foot } })
}

/**
 * What the tab does about deletion. `place()` is where the run that was deleted last stands, `trash()` what `makeTrash`
 * made; both of the tab on the page, none while it is closed. `attempt` shows why something failed, `tell` a sentence,
 * `takeOut` takes a run out of the chart, and `load` lists the runs again.
 */
export function deletion({ place, trash, attempt, tell, takeOut, load }) {
  async function changed() {
    window.dispatchEvent(new Event(RUNS_CHANGED))
    await load()
  }

  /** Shows the run that was deleted last. */
  function draw() {
    if (!place()) return
    const last = deleted.at(-1)
    keepFocus(place().parentElement, () => {
      sentence(place(), last?.text)
      if (!last) return
      button(place(), t(WORDS.undo), '', () => attempt(() => undo(last)))
      button(place(), '×', t(WORDS.forget), () => forget(last), 'tessera-plain').setAttribute('aria-label', t(WORDS.forget))
    })
  }

  function forget(run) {
    if (deleted.includes(run)) deleted.splice(deleted.indexOf(run), 1)
    draw()
  }

  async function remove(id) {
    const { folder, trash: where, left } = await change(`runs/${id}/delete`)
    const text = t(WORDS.deleted, { name: folder, trash: where.split('/').slice(0, 2).join('/') })
    deleted.push({ id, folder, text: left ? `${text} ${t(WORDS.left, { count: left })}` : text })
    takeOut(id)
    tell('')
    draw()
    await changed()
  }

  async function undo(run) {
    if (run.isAsked) return
    run.isAsked = true
    try {
      await change(`runs/${run.id}/restore`)
    } catch (error) {
      if (error.status === 404) forget(run) // its files are gone
      throw error
    } finally {
      run.isAsked = false
    }
    for (const each of deleted.filter(({ id }) => id === run.id)) forget(each)
    tell(t(WORDS.restored, { name: run.folder }))
    await changed()
  }

  async function empty(count, bytes) {
    const message = t(WORDS.sure, { count, size: size(bytes) })
    if (!(await app.extensionManager.dialog.confirm({ title: t(WORDS.empty), message, type: 'delete' }))) return
    const { removed } = await change('trash/empty')
    deleted.length = 0
    draw()
    tell(t(WORDS.emptied, { count: removed }))
    await changed()
  }

  /** Shows what is in the trash. `off` is why nothing in it can be changed. */
  async function drawTrash(off) {
    const { runs, bytes } = await read('trash')
    const box = trash()
    if (!box) return
    const { summary, list, foot } = box.parts
    const press = (parent, text, title, does) => enable(button(parent, text, off || title, () => attempt(does)), !off)
    keepFocus(box.parentElement, () => {
      box.style.display = runs.length ? '' : 'none'
      summary.textContent = t(WORDS.trash, { count: runs.length, size: size(bytes) })
      list.replaceChildren()
      foot.replaceChildren()
      for (const run of runs) {
        const row = part(list, 'tessera-trash-run')
        const text = `${run.folder} · ${run.day} · ${size(run.bytes)}`
        part(row, 'tessera-fit', 'span', { textContent: text })
        press(row, t(WORDS.bringBack), t(WORDS.bringBackTitle), () => undo(run))
        row.lastElementChild.setAttribute('aria-label', `${t(WORDS.bringBack)}: ${run.folder}`)
      }
      press(foot, t(WORDS.empty), t(WORDS.emptyTitle), () => empty(runs.length, bytes))
    }, () => summary)
  }

  return { draw, drawTrash, remove }
}
