// The editor of captions: one picture at a time with its caption, which is typed in place and saved beside it.
import { button, enable, keepFromCanvas, part } from '../common/elements.js'
import { t } from '../common/words.js'
import { change, read } from '../run/ask.js'
import { makeSearch } from './search.js'

export const ALL = 'all'
export const MISSING = 'missing'
export const REVIEW = 'review' // those that a model wrote and nobody has looked at

/**
 * Opens the editor over the page.
 * @param {object} options
 * @param {Record<string, string>} options.place The folder as the node has it, for the server.
 * @param {string} [options.file] Id of the file to begin with; the first without.
 * @param {string} [options.only] Which captions are walked through.
 * @param {(file: string) => string} options.picture Address of the picture of a file.
 * @param {() => void} options.changed Called when it closes, as captions may be others by then.
 */
export function openEditor({ place, file = '', only = ALL, picture, changed }) {
  const before = /** @type {HTMLElement | null} */ (document.activeElement)
  const dialog = part(document.body, 'tessera-editor', 'dialog')
  dialog.setAttribute('aria-label', t('Captions'))
  const stage = part(dialog, 'tessera-editor-stage')
  const image = part(stage, '', 'img', { draggable: false })
  const side = part(dialog, 'tessera-editor-side')
  const head = part(side, 'tessera-editor-row')
  const title = part(head, 'tessera-grow tessera-cut')
  const lacking = button(head, '', t('Show only those'), () => act(toggleMissing))
  button(head, '×', t('Save and close (Esc)'), () => act(close), 'tessera-plain').setAttribute('aria-label', t('Save and close (Esc)'))
  const text = part(side, 'tessera-editor-text', 'textarea', { spellcheck: true, placeholder: t('Type the caption here.') })
  text.setAttribute('aria-label', t('Caption'))
  const said = part(side, 'tessera-editor-said')
  said.setAttribute('role', 'status')
  const foot = part(side, 'tessera-editor-row')
  const back = button(foot, t('‹ Previous'), t('Save and go back (Page Up)'), () => act(() => step(-1)))
  const on = button(foot, t('Next ›'), t('Save and go on (Page Down, or Ctrl+Enter)'), () => act(() => step(1)))
  const undoing = button(foot, t('Undo'), t('Take the last saved edit back'), () => act(undo))
  part(foot, 'tessera-aside tessera-fit', 'span', { textContent: t('Page Down: next, Page Up: previous, Ctrl+S: save, Esc: close') })
  const search = makeSearch(side, { ask: replace, act })

  let entry // as the server has it
  let working = Promise.resolve() // one thing after the other
  let isOpen = true
  let failed = false // the text that is typed could not be saved
  const undos = []

  const say = (sentence, wrong = false) => {
    said.textContent = sentence
    said.classList.toggle('tessera-error', wrong)
  }

  /** Does something after what was asked before. Says why it failed. */
  function act(does) {
    working = working.then(() => isOpen && does()).catch((error) => say(error.message, true))
    return working
  }

  const find = async (options) => (await read(`captions?${new URLSearchParams({ ...place, only, ...options })}`)).entry
  const isTyped = () => Boolean(entry) && !entry.locked && text.value.trim() !== (entry.text ?? '')

  function show(next) {
    entry = next
    failed = false
    title.textContent = entry ? t('{at} of {all}: {title}', { at: entry.at, all: entry.count, title: entry.name }) : ''
    title.title = entry?.name ?? ''
    image.style.visibility = entry ? '' : 'hidden'
    if (entry) Object.assign(image, { src: picture(entry.file), alt: entry.name })
    text.value = entry?.text ?? ''
    text.readOnly = !entry || Boolean(entry.locked)
    lacking.textContent = only === ALL ? t('{count} without a caption', { count: entry?.missing ?? 0 }) : t('Show all {count}', { count: entry?.count ?? '' })
    lacking.style.display = only !== ALL || entry?.missing ? '' : 'none'
    enable(undoing, undos.length > 0)
    for (const each of [back, on]) enable(each, Boolean(entry))
    if (entry) say(entry.locked || (entry.text === null ? t('No caption yet: it will be saved as {file}.', { file: entry.caption_file }) : waiting()))
    else say(t('There is nothing to show.'))
    text.focus()
  }

  const waiting = () => (only === REVIEW ? t('Written by a model, {count} to look at. Next takes it as it is now.', { count: entry.review }) : '')

  /** Writes what was typed, if anything was. In a review the server notes that somebody has looked. `walk`: where to go on. */
  async function save(walk = {}) {
    if (!isTyped() && !(only === REVIEW && entry && !entry.locked && entry.text !== null)) return
    failed = true
    const saved = await change('captions/save', { place, file: entry.file, before: entry.text, text: text.value, ...walk })
    failed = false
    entry = { ...entry, missing: entry.missing - (entry.text === null ? 1 : 0), text: saved.text }
    if (saved.undo) undos.push(saved.undo)
    enable(undoing, undos.length > 0)
    say(saved.undo ? t('Saved.') : '')
    return saved
  }

  async function step(by) {
    const saved = await save({ step: by, only })
    const next = saved ? saved.entry : await find({ file: entry?.file ?? '', step: by })
    if (next) show(next)
    else say(by > 0 ? t('This is the last one.') : t('This is the first one.'))
  }

  const again = async () => show(await find({ file: entry?.file ?? '', step: 0, only: ALL }))

  async function toggleMissing() {
    await save()
    only = only === ALL ? MISSING : ALL
    const next = only === ALL || entry?.text === null ? entry : await find({ file: '', step: 1 })
    show(next ?? entry)
  }

  async function undo() {
    if (isTyped()) {
      text.value = entry.text ?? '' // what isn't saved yet goes first
      return say('')
    }
    const last = undos.at(-1)
    if (!last) return
    const { restored, changed: others } = await change('captions/undo', { undo: last })
    undos.pop()
    await again()
    say(others.length ? t('Captions restored: {count}. Changed since, so left alone: {files}.', { count: restored, files: others.join(', ') }) : t('Captions restored: {count}.', { count: restored }))
  }

  /** Counts matches in the folder, or replaces them. */
  async function replace({ apply, ...wanted }) {
    await save()
    if (apply) say(t('Replacing…'))
    const found = await change('captions/replace', { place, ...wanted, apply })
    if (!apply) return found
    if (found.undo) undos.push(found.undo)
    await again()
    say(t('Captions changed: {count}.', { count: found.captions }))
    return found
  }

  async function close() {
    if (!failed && isTyped()) await save() // the second time it closes without
    isOpen = false
    window.removeEventListener('keydown', pressed, true)
    dialog.remove()
    changed()
    if (before?.isConnected) before.focus()
  }

  function keyOf({ key, ctrlKey, metaKey, shiftKey }) {
    const command = ctrlKey || metaKey
    if (key === 'Escape') return close
    if (key === 'PageDown' || (command && key === 'Enter' && !shiftKey)) return () => step(1)
    if (key === 'PageUp' || (command && key === 'Enter')) return () => step(-1)
    return command && key.toLowerCase() === 's' ? save : undefined
  }

  /** Before the page, which would queue the workflow or delete nodes. */
  function pressed(event) {
    if (!dialog.contains(event.target) && event.target !== document.body) return
    event.stopImmediatePropagation()
    const does = search.keyOf(event) ?? keyOf(event)
    if (!does || event.isComposing) return
    event.preventDefault()
    act(does)
  }

  window.addEventListener('keydown', pressed, true)
  keepFromCanvas(dialog, 'keyup', 'pointerdown', 'pointerup', 'wheel', 'copy', 'cut', 'paste', 'dragenter', 'dragover', 'drop', 'contextmenu')
  dialog.addEventListener('cancel', (event) => event.preventDefault())
  dialog.showModal()
  return act(async () => show((file && (await find({ file, step: 0, only: ALL }))) || (await find({ step: 1 }))))
}
