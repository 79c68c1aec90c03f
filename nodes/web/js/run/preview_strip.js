// The previews of a run as a strip over the steps, which opens large. Titles came from the server, so they are set as
// text, never as HTML.

import { button, keepFromCanvas, part } from '../common/elements.js'
import { t } from '../common/words.js'

const HEIGHT = 84 // of the strip, in pixels, as tessera.css has it

/** Makes an empty strip; `addressOf(preview, isSmall)` is where the server gives a preview. */
export function makeStrip(addressOf) {
  const element = document.createElement('div')
  element.className = 'tessera-strip'
  element.style.display = 'none'
  const pictures = part(element, 'tessera-previews')
  keepFromCanvas(element, 'pointerdown', 'wheel')
  pictures.addEventListener('wheel', (event) => {
    pictures.scrollLeft += event.deltaY || event.deltaX
    event.preventDefault()
  })
  return { element, pictures, addressOf, shown: '', row: 0 }
}

/** Shows the previews, of one prompt at a time. Returns the strip's height. */
export function drawStrip(strip, previews) {
  const { element, pictures } = strip
  const shown = JSON.stringify(previews)
  if (shown === strip.shown) return previews.length ? HEIGHT : 0
  strip.shown = shown
  element.style.display = previews.length ? 'flex' : 'none'
  const rows = [...new Set(previews.map(({ row }) => row))].sort((a, b) => a - b)
  if (!rows.includes(strip.row)) strip.row = rows[0] ?? 0
  const wasAtEnd = pictures.scrollLeft + pictures.clientWidth >= pictures.scrollWidth - 4
  pictures.replaceChildren(
    ...previews.filter(({ row }) => row === strip.row).map((preview) => thumbnail(strip, preview, previews)),
  )
  element.replaceChildren(...(rows.length > 1 ? [rowButton(strip, previews, rows)] : []), pictures)
  if (wasAtEnd) requestAnimationFrame(() => (pictures.scrollLeft = pictures.scrollWidth)) // once it has its place
  return previews.length ? HEIGHT : 0
}

/** The button that shows the next prompt. */
function rowButton(strip, previews, rows) {
  const at = rows.indexOf(strip.row)
  const { title } = previews.find(({ row }) => row === strip.row)
  const next = () => {
    strip.row = rows[(at + 1) % rows.length]
    strip.shown = ''
    drawStrip(strip, previews)
  }
  const [text, hint] = [t('{at} of {all}', { at: at + 1, all: rows.length }), t('{title}: click for the next prompt', { title })]
  return button(document.createDocumentFragment(), `${text} ▾`, hint, next, 'tessera-prompt')
}

function thumbnail(strip, preview, previews) {
  const text = t('{title}, step {step}', preview)
  const element = part(document.createDocumentFragment(), 'tessera-thumbnail', 'button', { type: 'button', title: t('{title}: click to open large', { title: text }) })
  part(element, '', 'img', { loading: 'lazy', draggable: false, alt: text, src: strip.addressOf(preview, true) })
  part(element, '', 'span', { textContent: preview.step })
  element.addEventListener('click', () => open(strip, preview, previews, element))
  return element
}

/** Opens a preview over the page. Arrows go along the steps and the prompts; Escape and a click close it. */
function open(strip, first, previews, from) {
  let shown = first
  const overlay = part(document.body, 'tessera-large', 'div', { tabIndex: -1 })
  overlay.setAttribute('role', 'dialog')
  overlay.setAttribute('aria-modal', 'true')
  overlay.setAttribute('aria-label', t('Preview'))
  const image = part(overlay, '', 'img')
  const caption = part(overlay, 'tessera-large-caption')
  const hint = part(overlay, 'tessera-large-keys')
  const steps = () => previews.filter(({ row }) => row === shown.row)
  const rows = [...new Set(previews.map(({ row }) => row))].sort((a, b) => a - b)
  hint.textContent = rows.length > 1 ? t('← → steps, ↑ ↓ prompts, Esc closes') : t('← → steps, Esc closes')

  const show = (preview) => {
    if (!preview) return
    shown = preview
    const text = t('{title}, step {step}', preview)
    Object.assign(image, { src: strip.addressOf(preview, false), alt: text })
    caption.textContent = `${text} (${t('{at} of {all}', { at: steps().indexOf(preview) + 1, all: steps().length })})`
  }
  const along = (by) => show(steps()[steps().indexOf(shown) + by])
  const across = (by) => {
    const row = rows[rows.indexOf(shown.row) + by]
    show(previews.find((other) => other.row === row && other.step === shown.step) ?? previews.find((other) => other.row === row))
  }
  const keys = {
    ArrowLeft: () => along(-1), ArrowRight: () => along(1), ArrowUp: () => across(-1), ArrowDown: () => across(1),
    Home: () => show(steps()[0]), End: () => show(steps().at(-1)), Escape: () => close(),
  }
  const pressed = (event) => { // before the page, which would move or delete nodes
    event.stopImmediatePropagation()
    if (!(event.key in keys)) return
    event.preventDefault()
    keys[event.key]()
  }
  const close = () => {
    window.removeEventListener('keydown', pressed, true)
    overlay.remove()
    if (from.isConnected) from.focus()
  }
  window.addEventListener('keydown', pressed, true)
  keepFromCanvas(overlay, 'pointerdown', 'pointerup', 'wheel')
  overlay.addEventListener('click', close)
  show(first)
  overlay.focus()
}
