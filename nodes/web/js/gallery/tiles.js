// A page of thumbnails with captions. All in it came from files, so it is set as text, never as HTML.

import { button, enable, keepFromCanvas, part } from '../common/elements.js'
import { t } from '../common/words.js'

const AT_ONCE = 3 // thumbnails asked for; a browser has six connections to a server, and others need some

/**
 * Makes an empty gallery; `drawPage` fills it. `turn(page, missing)` asks for another page, `edit(file, review)` opens the
 * editor of captions.
 */
export function makeGallery(turn, edit) {
  const element = document.createElement('div')
  element.className = 'tessera-gallery'
  const head = part(element, 'tessera-gallery-head')
  const count = part(head, 'tessera-grow tessera-cut')
  const lacking = button(head, '', '', () => turn(0, !gallery.view.missing), 'tessera-lacking')
  const review = button(head, '', t('Look at the captions that a model wrote'), () => edit('', true))
  const editing = button(head, t('Edit captions'), t('Write captions, and search and replace in all of them'), () => edit(''))
  const back = button(head, '‹', t('Previous page'), () => turn(gallery.view.page - 1, gallery.view.missing))
  const on = button(head, '›', t('Next page'), () => turn(gallery.view.page + 1, gallery.view.missing))
  const said = part(element, 'tessera-gallery-said')
  const news = part(element, 'tessera-gallery-news')
  for (const each of [said, news]) each.style.display = 'none'
  news.setAttribute('role', 'status')
  const tiles = part(element, 'tessera-tiles')
  tiles.tabIndex = 0
  tiles.dataset.captureWheel = 'true' // it scrolls, where the canvas would zoom
  tiles.addEventListener('wheel', (event) => {
    if (tiles.scrollHeight > tiles.clientHeight && !event.ctrlKey) event.stopPropagation()
  })
  const gallery = Object.assign(element, {
    parts: { count, lacking, review, editing, back, on, said, news, tiles },
    edit,
    view: { page: 0, missing: false, count: 0 },
    told: '', // what is shown, to draw it once
    loads: /** @type {AbortController | undefined} */ (undefined),
    stop: () => gallery.loads?.abort(),
  })
  return gallery
}

const COUNT_WORDS = {
  pictures: ['1 picture', '{count} pictures', '1 picture without a caption', '{count} pictures without a caption'],
  clips: ['1 clip', '{count} clips', '1 clip without a caption', '{count} clips without a caption'],
}
const EMPTY_WORDS = {
  pictures: 'No pictures yet: drop them here.',
  clips: 'No clips yet: drop them here.',
}

const number = (count) => count.toLocaleString('en')

function counted(count, kind, missing) {
  return t(COUNT_WORDS[kind][(missing ? 2 : 0) + (count === 1 ? 0 : 1)], { count: number(count) })
}

/**
 * Shows a page as the server's route tells it. `kind`: pictures or clips. `missing`: only those without a caption are
 * listed. `framed`: the parts that are trained on are drawn. `url` gives the address of an entry's thumbnail.
 */
export function drawPage(gallery, found, { kind, missing, framed, url }) {
  const { count, lacking, review, editing, back, on, said, tiles } = gallery.parts
  const told = JSON.stringify([found, kind, missing, framed])
  if (gallery.told === told) return
  Object.assign(gallery, { told, view: { page: found.page, missing, count: found.count } })
  const total = missing ? found.missing : found.count
  const first = found.page * 24
  const range = { from: first + 1, to: first + found.entries.length, all: counted(total, kind, missing) }
  count.textContent = found.pages > 1 ? t('{from}–{to} of {all}', range) : range.all
  lacking.style.display = found.missing ? '' : 'none'
  lacking.textContent = missing
    ? t('Show all {count}', { count: number(found.count) })
    : t('{count} without a caption', { count: number(found.missing) })
  lacking.title = missing ? '' : t('Show only those')
  review.style.display = found.waiting ? '' : 'none'
  review.textContent = t('Review {count}', { count: number(found.waiting) })
  editing.style.display = found.count ? '' : 'none'
  for (const each of [back, on]) each.style.display = found.pages > 1 ? '' : 'none'
  enable(back, found.page > 0)
  enable(on, found.page < found.pages - 1)
  const frames = framed && found.entries.some((entry) => entry.crops.length)
  tell(said, [
    !found.count && t(EMPTY_WORDS[kind]),
    found.unread && t('Files of other types, which are not read: {count}.', { count: found.unread }),
    ...found.notes,
    frames && t('Orange frame: the part that is trained on.'),
  ])
  gallery.stop()
  gallery.loads = new AbortController()
  const waiting = found.entries.map((entry) => tile(tiles, entry, framed, url(entry), gallery.edit))
  tiles.replaceChildren(...waiting.map(({ element }) => element))
  tiles.scrollTop = 0
  for (let n = 0; n < AT_ONCE; n += 1) loadNext(waiting, gallery.loads.signal)
}

/** Says under the head of a gallery what becomes of dropped files. */
export const tellNews = (gallery, text) => tell(gallery.parts.news, [text])

function tell(element, sentences) {
  element.textContent = sentences.filter(Boolean).join(' ')
  element.style.display = element.textContent ? '' : 'none'
}

function tile(parent, entry, framed, url, edit) {
  const element = document.createElement('div')
  element.className = 'tessera-tile'
  element.title = [entry.name, entry.problem || (entry.caption ?? t('no caption'))].join('\n\n')
  const stage = part(element, 'tessera-tile-stage')
  const shown = part(stage, 'tessera-tile-shown')
  const caption = part(element, 'tessera-tile-caption')
  keepFromCanvas(caption, 'pointerdown')
  caption.addEventListener('click', () => edit(entry.file))
  const wrong = entry.problem || entry.caption == null
  caption.textContent = wrong
    ? entry.problem ? t('caption can’t be read') : t('no caption')
    : entry.caption || t('(empty)')
  if (wrong) caption.classList.add('tessera-wrong')
  else if (!entry.caption) caption.classList.add('tessera-aside')
  return { element, shown, url, crops: framed ? entry.crops : [], name: entry.name }
}

/** Loads thumbnails one after the other until none waits. */
async function loadNext(waiting, signal) {
  for (let next; !signal.aborted && (next = waiting.shift()); ) await load(next, signal)
}

async function load({ element, shown, url, crops, name }, signal) {
  try {
    const answer = await fetch(url, { signal })
    if (!answer.ok) throw new Error((await answer.json()).error)
    const image = part(shown, '', 'img')
    image.alt = name
    image.draggable = false
    image.src = URL.createObjectURL(await answer.blob())
    image.onload = () => URL.revokeObjectURL(image.src)
    const dims = crops.length === 1 // several would darken one another
    for (const box of crops) frame(shown, box, dims)
  } catch (error) {
    if (signal.aborted) return
    element.title += `\n\n${error.message}`
    shown.classList.add('tessera-unread')
    shown.textContent = t('can’t be shown')
  }
}

function frame(shown, [left, top, right, bottom], dims) {
  const percent = (value) => `${(100 * value).toFixed(2)}%`
  Object.assign(part(shown, `tessera-frame${dims ? ' tessera-alone' : ''}`).style, {
    left: percent(left), top: percent(top), width: percent(right - left), height: percent(bottom - top),
  })
}
