// Search and replace over the captions of a folder: what would change is counted before anything is written.
import { button, enable, part } from '../common/elements.js'
import { t } from '../common/words.js'

const WAIT = 250 // milliseconds after a key, until it is counted

/**
 * Makes the row of search and replace. `ask({search, replacement, match_case, apply})` counts matches or replaces them;
 * `act` does something after what was asked before.
 */
export function makeSearch(parent, { ask, act }) {
  const box = part(parent, 'tessera-editor-search')
  const row = part(box, 'tessera-editor-row')
  const search = field(row, t('Search in all captions'))
  const replacement = field(row, t('Replace with'))
  const below = part(box, 'tessera-editor-row')
  const label = part(below, '', 'label')
  const matchCase = part(label, '', 'input', { type: 'checkbox' })
  label.append(` ${t('Match case')}`)
  const count = part(below, 'tessera-fit tessera-aside', 'span')
  count.setAttribute('role', 'status')
  const all = button(below, t('Replace all'), t('Replaces in every caption of the folder; Undo takes it back'), () => act(apply))
  enable(all, false)

  let timer
  const wanted = () => ({ search: search.value, replacement: replacement.value, match_case: matchCase.checked })

  async function look() {
    const text = search.value
    if (!text) return show()
    show(await ask({ ...wanted(), apply: false }))
  }

  function show(found) {
    enable(all, Boolean(found?.captions))
    if (!found) count.textContent = ''
    else if (!found.captions && !found.locked) count.textContent = t('Not found.')
    else {
      const locked = found.locked ? t('; {count} more can’t be changed here', { count: found.locked }) : ''
      count.textContent = `${t('Matches: {matches}, in captions: {captions}', found)}${locked}`
    }
  }

  async function apply() {
    if (!search.value) return
    await ask({ ...wanted(), apply: true })
    await look()
  }

  function soon() {
    enable(all, false)
    clearTimeout(timer)
    timer = setTimeout(() => act(look), WAIT)
  }

  for (const each of [search, replacement]) each.addEventListener('input', soon)
  matchCase.addEventListener('change', soon)
  return { keyOf: ({ key, target }) => (key === 'Enter' && (target === search || target === replacement) ? look : undefined) }
}

function field(parent, name) {
  const element = part(parent, 'tessera-editor-field tessera-grow', 'input', { type: 'text', placeholder: name })
  element.setAttribute('aria-label', name)
  return element
}
