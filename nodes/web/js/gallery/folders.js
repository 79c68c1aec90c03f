// Training Images and Training Clips show what lies in their folder: thumbnails with captions, a page at a time.
import { app } from '../../../../scripts/app.js'
import { api } from '../../../../scripts/api.js'
import { ALL, MISSING, openEditor, REVIEW } from '../captions/editor.js'
import { nodeAt, ourNodes } from '../common/nodes.js'
import { stateOf } from '../common/state.js'
import { throttle } from '../common/throttle.js'
import { after, sourceWidget, widgetOf } from '../common/widgets.js'
import { t } from '../common/words.js'
import { addBrushes } from '../review/mask_brush.js'
import { drawPage, makeGallery } from './tiles.js'
import { acceptDrops, catchDrops } from './upload.js'

const KINDS = { TesseraImageFolder: 'pictures', TesseraVideoFolder: 'clips', TesseraCaptionFolder: 'pictures' }
const WIDGET = 'tessera_gallery'
const ASKED = ['folder', 'caption_extension', 'control_folder', 'mask_folder', 'layout']
const LEAST_HEIGHT = { row: 225, rows: 345 } // of the gallery: one row, or two; a taller node shows more of them
const IN_A_ROW = 3 // of the least width
const LEAST_WIDTH = 380
const NOTHING = { count: 0, missing: 0, waiting: 0, unread: '', page: 0, pages: 1, entries: [], notes: [] } // of a folder that is absent

/** The widget that an input's value comes from; in a subgraph it may be one of the node around it. */
function widgetFor(node, name) {
  const [, , hosts] = [...ourNodes()].find(([one]) => one === node) ?? []
  return sourceWidget(node, name, hosts)
}

const captionExtension = (node) => widgetFor(node, 'caption_extension')?.value || '.txt'

/** Tells whether what the node gives reaches a Prepare Dataset; within other subgraphs any is taken for that one. */
function isPrepared(node, seen = new Set()) {
  if (seen.has(node)) return false
  seen.add(node)
  const links = (node.outputs ?? []).flatMap((output) => output.links ?? [])
  return links.some((id) => {
    const { target_id: target, target_slot: slot } = node.graph.getLink?.(id) ?? node.graph.links.get(id) ?? {}
    const next = node.graph.getNodeById(target)
    if (!next || next.subgraph) return [...ourNodes()].some(([one]) => one.type === 'TesseraPrepareDataset')
    if (next.type === 'TesseraPrepareDataset') return true
    const goesOn = next.type in KINDS ? next.inputs[slot]?.name === 'dataset' : next.type === 'Reroute'
    return goesOn && isPrepared(next, seen)
  })
}

function galleryOf(node) {
  const state = stateOf(node)
  if (state.gallery) return state.gallery
  const gallery = makeGallery((page, missing) => turn(node, page, missing), (file, review) => edit(node, file, review))
  const widget = node.addDOMWidget(WIDGET, 'tessera', gallery, {
    serialize: false, // out of the prompt, and below out of the saved workflow
    hideOnZoom: false,
    getMinHeight: () => (gallery.view.count > IN_A_ROW ? LEAST_HEIGHT.rows : LEAST_HEIGHT.row),
  })
  widget.serialize = false
  state.gallery = gallery
  makeRoom(node, LEAST_WIDTH)
  return gallery
}

function makeRoom(node, leastWidth = 0) {
  const [width, height] = [Math.max(node.size[0], leastWidth), Math.max(node.size[1], node.computeSize()[1])]
  if (width > node.size[0] || height > node.size[1]) node.setSize([width, height])
}

function removeGallery(node) {
  const widget = widgetOf(node, WIDGET)
  if (!widget) return
  const room = widget.computedHeight ?? 0
  stateOf(node).gallery.stop()
  stateOf(node).gallery = undefined
  node.removeWidget(widget)
  node.setSize([node.size[0], Math.max(node.computeSize()[1], node.size[1] - room)])
}

function turn(node, page, missing) {
  Object.assign(stateOf(node).page, { page, missing })
  return refresh(node)
}

/** Shows the folder as it is now. One question at a time; what comes meanwhile asks again after it. */
export function refresh(node) {
  const page = (stateOf(node).page ??= { page: 0, missing: false })
  page.again = true
  page.asking ??= askUntilShown(node, page).finally(() => (page.asking = undefined))
  return page.asking
}

async function askUntilShown(node, state) {
  while (state.again) {
    state.again = false
    try {
      await update(node, state)
    } catch (error) {
      console.warn('Tessera: the folder could not be listed', error) // the server is away
    }
  }
}

/**
 * The folder as the node has it, for the server.
 * @returns {Record<string, string>}
 */
function placeOf(node) {
  const place = { kind: KINDS[node.type] }
  for (const name of ASKED) place[name] = widgetFor(node, name)?.value ?? ''
  place.caption_extension = captionExtension(node)
  return place
}

function addressOf(place, rest) {
  const asked = new URLSearchParams({ kind: place.kind, folder: place.folder, ...rest })
  return api.apiURL(`/tessera/folder/thumbnail?${asked}`)
}

/** Opens the editor of captions, at a file or at the first one; `review`: of those that a model wrote. */
function edit(node, file, review) {
  const place = placeOf(node)
  const only = review ? REVIEW : stateOf(node).page?.missing ? MISSING : ALL
  openEditor({ place, file, only, picture: (shown) => addressOf(place, { file: shown, large: '1' }), changed: refreshSoon })
}

async function update(node, state) {
  const folder = widgetFor(node, 'folder')
  if (!folder?.value || !node.graph) return removeGallery(node)
  const kind = KINDS[node.type]
  const place = placeOf(node)
  if (state.folder !== folder.value) Object.assign(state, { folder: folder.value, page: 0, missing: false })
  const asked = new URLSearchParams({ ...place, page: `${state.page}`, missing: state.missing ? '1' : '0' })
  const answer = await api.fetchApi(`/tessera/folder?${asked}`, { cache: 'no-store' })
  const found = await answer.json()
  if (!node.graph) return removeGallery(node) // deleted meanwhile
  const { endings = state.endings, beside = state.beside } = found
  Object.assign(state, { endings, beside })
  if (!answer.ok && !found.absent) return removeGallery(node) // errors.js and the run say why
  if (found.absent) Object.assign(found, NOTHING)
  state.page = found.page
  const url = ({ file, state: changed }) => addressOf(place, { file, changed })
  drawPage(galleryOf(node), found, { kind, missing: state.missing, framed: isPrepared(node), url })
  if (kind === 'pictures') addBrushes(galleryOf(node), found.entries, place, () => refresh(node))
  makeRoom(node)
  node.graph?.setDirtyCanvas(true, true)
}

const folderNodes = () => [...ourNodes()].map(([node]) => node).filter(({ type }) => type in KINDS)

function refreshAll() {
  for (const node of folderNodes()) refresh(node)
}

/** The subfolder of ComfyUI's input that dropped files go to: the node's own, or a new one. */
function placeFor(node) {
  const folder = widgetFor(node, 'folder')
  if (!folder) return undefined
  const [root, ...below] = String(folder.value ?? '').split('/')
  if (root === 'input' && below.length) return { subfolder: below.join('/'), isNew: false }
  const taken = folder.options?.values ?? []
  const name = (count) => `dropped_${KINDS[node.type]}${count > 1 ? `_${count}` : ''}`
  let count = 1
  while (taken.includes(`input/${name(count)}`)) count += 1
  return { subfolder: name(count), isNew: true }
}

/** Shows the folder that dropped files went to. Returns what to tell where it is another one than before. */
async function showFolder(node, subfolder) {
  const folder = widgetFor(node, 'folder')
  const value = `input/${subfolder}`
  const isOther = folder && folder.value !== value
  if (isOther) {
    folder.value = value
    folder.callback?.(value)
  }
  await refresh(node) // the server lists the folder from now on
  if (stateOf(node).error || !folder?.options?.values?.includes(value)) await app.refreshComboInNodes?.()
  return isOther ? t('Copied to {folder}, which this node reads now: files can be dropped into folders under input only.', { folder: value }) : ''
}

const refreshSoon = throttle(200, refreshAll)

app.registerExtension({
  name: 'tessera.gallery',
  setup() {
    catchDrops(folderNodes)
    api.addEventListener('executed', ({ detail }) => {
      if (nodeAt(detail.node)?.type === 'TesseraPrepareDataset') refreshSoon() // it has planned the crops
    })
    for (const end of ['execution_success', 'execution_error', 'execution_interrupted']) api.addEventListener(end, refreshSoon)
    document.addEventListener('visibilitychange', () => document.visibilityState === 'visible' && refreshSoon())
    app.canvas?.canvas?.addEventListener('litegraph:set-graph', refreshSoon) // into a subgraph, whose folder was chosen outside
  },
  nodeCreated(node) {
    if (!(node.comfyClass in KINDS)) return // its type is not known yet
    for (const name of ASKED) {
      const widget = widgetOf(node, name)
      if (widget) after(widget, () => refresh(node))
    }
    const { onConnectionsChange, onRemoved } = node
    node.onConnectionsChange = function (...rest) {
      onConnectionsChange?.apply(this, rest)
      refreshSoon()
    }
    node.onRemoved = function (...rest) {
      onRemoved?.apply(this, rest)
      stateOf(node).gallery?.stop()
    }
    acceptDrops(node, {
      gallery: () => galleryOf(node),
      place: () => placeFor(node),
      endings: () => stateOf(node).page,
      captionEnding: () => `.${captionExtension(node).trim().replace(/^\.+/, '')}`,
      shown: (subfolder) => showFolder(node, subfolder),
    })
    refreshSoon()
  },
  afterConfigureGraph: refreshSoon,
  refreshComboInNodes: refreshSoon,
})
