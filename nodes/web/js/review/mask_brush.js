// A brush on a picture of Training Images: what is painted is learnt, the rest is not. The server saves the mask beside
// the picture, or in the node's mask_folder.
import { api } from '../../../../scripts/api.js'
import { button, enable, part } from '../common/elements.js'
import { t } from '../common/words.js'

const SHADE = 'rgb(160 0 0 / 60%)' // over what is not learnt
const SIZES = { min: 4, max: 300, value: 60 } // of the brush, where 1024 are the longer side of the picture
const LARGE = 0.65 // of the page's height: smaller pictures are shown enlarged

/**
 * Puts a brush on each tile of a gallery that has none yet. `entries`: of the tiles, in their order. `place`: the
 * folder's inputs, as the server's route takes them. `saved` is called when a mask was saved.
 */
export function addBrushes(gallery, entries, place, saved) {
  const tiles = /** @type {Element[]} */ ([...gallery.parts.tiles.children])
  entries.forEach((entry, at) => {
    const tile = tiles[at]
    if (!tile || tile.querySelector('.tessera-brush')) return
    const title = entry.masked ? t('Change the mask') : t('Draw a mask')
    const name = `tessera-brush${entry.masked ? ' tessera-masked' : ''}`
    // Its sign is in the styles: the text of a tile is the caption.
    button(tile, '', title, () => openBrush(entry, place, saved), name).setAttribute('aria-label', title)
  })
}

/** Opens the picture of an entry to draw on. */
async function openBrush(entry, place, saved) {
  const dialog = part(document.body, 'tessera-mask', 'dialog')
  dialog.addEventListener('close', () => dialog.remove())
  dialog.addEventListener('keydown', (event) => event.stopPropagation()) // else ComfyUI's shortcuts hear it
  const head = part(dialog, 'tessera-mask-head')
  part(head, 'tessera-grow tessera-cut', 'div', { textContent: entry.name })
  const said = part(dialog, 'tessera-mask-said')
  said.setAttribute('role', 'status')
  const say = (sentence, wrong = false) => {
    said.textContent = sentence
    said.classList.toggle('tessera-error', wrong)
  }
  const stage = part(dialog, 'tessera-mask-stage')
  dialog.showModal()
  const asked = new URLSearchParams({ ...place, file: entry.file })
  try {
    const [picture, mask] = await Promise.all([
      loaded(`/tessera/folder/picture?${asked}`), loaded(`/tessera/mask?${asked}`),
    ])
    if (!picture || !dialog.open) return
    const drawing = makeDrawing(stage, picture, mask)
    say(t('Paint what is learnt; what stays red is not.'))
    addTools(head, drawing, async () => {
      say(t('Saving…'))
      const problem = await save(drawing, { ...place, file: entry.file })
      if (problem) return say(problem, true)
      dialog.close()
      saved()
    })
    askBeforeClosing(dialog, drawing, () => say(t('This mask isn’t saved yet. Press Esc again to close without it.'), true))
  } catch (error) {
    say(error.message, true)
  }
  button(head, t('Close'), t('Close without saving'), () => dialog.close())
}

/** The first Esc after a stroke only asks. */
function askBeforeClosing(dialog, drawing, ask) {
  let asked = 0 // strokes when it was asked
  dialog.addEventListener('cancel', (event) => {
    if (drawing.strokes.length === asked) return
    event.preventDefault()
    asked = drawing.strokes.length
    ask()
  })
}

/** The picture of an address; none where the answer is empty. */
async function loaded(address) {
  const answer = await api.fetchApi(address, { cache: 'no-store' })
  if (!answer.ok) throw new Error((await answer.json()).error)
  const blob = await answer.blob()
  return blob.size ? createImageBitmap(blob) : undefined
}

function canvasOf(parent, { width, height }) {
  const canvas = document.createElement('canvas')
  Object.assign(canvas, { width, height })
  parent?.append(canvas)
  return canvas
}

const pen = (canvas) => /** @type {CanvasRenderingContext2D} */ (canvas.getContext('2d', { willReadFrequently: true }))

/**
 * The picture with its mask over it. The mask is kept as alpha: what is opaque is learnt. Every stroke is kept, so that
 * it can be undone: the mask is painted again without it.
 */
function makeDrawing(stage, picture, mask) {
  const shown = canvasOf(stage, picture)
  const scale = Math.min((window.innerHeight * LARGE) / picture.height, (window.innerWidth * LARGE) / picture.width)
  if (scale > 1) shown.style.width = `${picture.width * scale}px`
  const painted = canvasOf(undefined, picture)
  const base = mask ? alphaOf(mask, picture) : undefined
  const drawing = {
    strokes: [], // each a list of points, or 'all' or 'nothing'
    undone: [],
    isErasing: false,
    size: (SIZES.value * Math.max(picture.width, picture.height)) / 1024, // of the brush, in pixels of the picture
    changed: () => {}, // called after each change
    add(stroke) {
      drawing.strokes.push(stroke)
      drawing.undone.length = 0
      repaint()
    },
    undo: () => move(drawing.strokes, drawing.undone),
    redo: () => move(drawing.undone, drawing.strokes),
    /** The mask, white where it is learnt. */
    async png() {
      const flat = canvasOf(undefined, picture)
      const brush = pen(flat)
      brush.fillRect(0, 0, flat.width, flat.height)
      brush.drawImage(painted, 0, 0)
      return new Promise((done) => flat.toBlob(done, 'image/png'))
    },
    /** Tells whether anything is learnt. */
    isEmpty: () => !pen(painted).getImageData(0, 0, painted.width, painted.height).data.some((value, at) => at % 4 === 3 && value),
  }

  function move(from, to) {
    if (from.length) to.push(from.pop())
    repaint()
  }

  function repaint() {
    const brush = pen(painted)
    brush.clearRect(0, 0, painted.width, painted.height)
    if (base) brush.drawImage(base, 0, 0)
    for (const stroke of drawing.strokes) paint(brush, stroke)
    show()
  }

  function show() {
    const brush = pen(shown)
    brush.globalCompositeOperation = 'copy'
    brush.fillStyle = SHADE
    brush.fillRect(0, 0, shown.width, shown.height)
    brush.globalCompositeOperation = 'destination-out'
    brush.drawImage(painted, 0, 0)
    brush.globalCompositeOperation = 'destination-over'
    brush.drawImage(picture, 0, 0)
    drawing.changed()
  }

  followPointer(shown, drawing, (stroke) => {
    paint(pen(painted), { ...stroke, points: stroke.points.slice(-2) })
    show()
  })
  repaint()
  return drawing
}

/** A mask as alpha, in the size of the picture. */
function alphaOf(mask, picture) {
  const canvas = canvasOf(undefined, picture)
  const brush = pen(canvas)
  brush.drawImage(mask, 0, 0, canvas.width, canvas.height)
  const pixels = brush.getImageData(0, 0, canvas.width, canvas.height)
  for (let at = 0; at < pixels.data.length; at += 4) pixels.data.set([255, 255, 255, pixels.data[at]], at)
  brush.putImageData(pixels, 0, 0)
  return canvas
}

function paint(brush, stroke) {
  const { width, height } = brush.canvas
  if (stroke === 'nothing') return brush.clearRect(0, 0, width, height)
  brush.globalCompositeOperation = stroke.isErasing ? 'destination-out' : 'source-over'
  Object.assign(brush, { fillStyle: 'white', strokeStyle: 'white', lineCap: 'round', lineJoin: 'round', lineWidth: stroke.size })
  if (stroke === 'all') return brush.fillRect(0, 0, width, height)
  brush.beginPath()
  for (const [x, y] of stroke.points) brush.lineTo(x, y)
  const [x, y] = stroke.points.at(-1)
  brush.lineTo(x + 0.01, y) // a line of no length is not drawn, and a click makes a dot
  brush.stroke()
}

/** Makes strokes of what the pointer does on a canvas; `draw` paints the last piece of one. */
function followPointer(canvas, drawing, draw) {
  let stroke
  const ring = part(canvas.parentElement, 'tessera-mask-ring') // as large as the brush
  const showRing = ({ clientX, clientY }) => {
    const box = canvas.getBoundingClientRect()
    const size = `${(drawing.size * box.width) / canvas.width}px`
    Object.assign(ring.style, { left: `${clientX}px`, top: `${clientY}px`, width: size, height: size, display: 'block' })
  }
  canvas.addEventListener('pointerleave', () => (ring.style.display = 'none'))
  const point = ({ clientX, clientY }) => {
    const box = canvas.getBoundingClientRect()
    return [((clientX - box.left) * canvas.width) / box.width, ((clientY - box.top) * canvas.height) / box.height]
  }
  canvas.addEventListener('pointerdown', (event) => {
    if (event.button) return
    canvas.setPointerCapture(event.pointerId)
    stroke = { isErasing: drawing.isErasing !== event.shiftKey, size: drawing.size, points: [point(event)] }
    draw(stroke)
  })
  canvas.addEventListener('pointermove', (event) => {
    showRing(event)
    if (!stroke) return
    stroke.points.push(point(event))
    draw(stroke)
  })
  for (const end of ['pointerup', 'pointercancel']) {
    canvas.addEventListener(end, () => {
      if (stroke) drawing.add(stroke)
      stroke = undefined
    })
  }
}

function addTools(head, drawing, keep) {
  const mode = (text, title, isErasing) => button(head, text, title, () => {
    drawing.isErasing = isErasing
    drawing.changed()
  })
  const add = mode(t('Learn'), t('Paint what is learnt; Shift paints the opposite'), false)
  const erase = mode(t('Leave out'), t('Paint what is not learnt'), true)
  const size = part(head, 'tessera-mask-size', 'input', { type: 'range', ...SIZES, title: t('Size of the brush') })
  const unit = drawing.size / SIZES.value
  size.addEventListener('input', () => (drawing.size = Number(size.value) * unit))
  button(head, t('All'), t('Learn all of the picture'), () => drawing.add('all'))
  button(head, t('Nothing'), t('Start again with nothing learnt'), () => drawing.add('nothing'))
  const undo = button(head, t('Undo'), 'Ctrl+Z', drawing.undo)
  const redo = button(head, t('Redo'), 'Ctrl+Y', drawing.redo)
  const done = button(head, t('Save'), t('Save the mask beside the picture'), keep)
  head.parentElement.addEventListener('keydown', (event) => {
    if (!(event.ctrlKey || event.metaKey)) return
    const key = event.key.toLowerCase()
    if (key !== 'z' && key !== 'y') return
    event.preventDefault()
    if (key === 'y' || event.shiftKey) drawing.redo()
    else drawing.undo()
  })
  drawing.changed = () => {
    add.setAttribute('aria-pressed', `${!drawing.isErasing}`)
    erase.setAttribute('aria-pressed', `${drawing.isErasing}`)
    enable(undo, drawing.strokes.length)
    enable(redo, drawing.undone.length)
    enable(done, drawing.strokes.length)
  }
  drawing.changed()
}

/** Sends the mask to the server. Returns what went wrong, if anything. */
async function save(drawing, place) {
  if (drawing.isEmpty()) return t('Nothing is painted, so nothing would be learnt; paint what is learnt.')
  const bytes = new Uint8Array(await (await drawing.png()).arrayBuffer())
  let text = ''
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000))
  const answer = await api.fetchApi('/tessera/mask', {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({ ...place, mask: btoa(text) }),
  })
  return answer.ok ? '' : (await answer.json()).error
}
