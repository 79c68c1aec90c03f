// Errors stand on the node that they are about: errors of a run, inputs that the server refused, folders that are
// not there.
import { app } from '../../../scripts/app.js'
import { api } from '../../../scripts/api.js'
import { isElsewhere, ourNodes, placeOf } from './common/nodes.js'
import { setError, show } from './report_widget.js'
import { every } from './common/poll.js'
import { stateOf } from './common/state.js'
import { after, sourceWidget, widgetOf } from './common/widgets.js'
import { t } from './common/words.js'

let renewed // definitions after R; nodes that stand there keep the class of the old ones
const ABSENT_WORDS = {
  TesseraImageFolder: 'No pictures in {folder} yet: drop them on this node, or choose another folder.',
  TesseraVideoFolder: 'No clips in {folder} yet: drop them on this node, or choose another folder.',
}
const KINDS = { TesseraImageFolder: 'pictures', TesseraVideoFolder: 'clips' }
const EVERY = 1000 // milliseconds between two looks at subgraph nodes, of whose inputs Nodes 2.0 tells nobody

/** One of the server's errors of a node, as a sentence. Ours stand behind the name of the input and a dash. */
function refusal({ type, message, details, extra_info }) {
  const input = extra_info?.input_name
  if (type === 'custom_validation_failed') return details?.slice(details.startsWith(`${input} - `) ? input.length + 3 : 0)
  return details ? `${message}: ${details}` : message
}

/** Prints what the server refused on the nodes that it is about: errors by the node's path, as the server gives them. */
export function showRefused(nodeErrors) {
  const said = new Map() // of each node, and of each subgraph around it
  for (const [path, { errors }] of Object.entries(nodeErrors ?? {})) {
    const { node, hosts } = placeOf(path)
    for (const place of node ? [node, ...hosts] : []) {
      said.set(place, [...(said.get(place) ?? []), ...(errors ?? []).map(refusal).filter(Boolean)])
    }
  }
  for (const [place, sentences] of said) {
    if (!sentences.length) continue
    if (place.type === 'TesseraTrainLora') show(place, []) // the lines below it are of an earlier run
    setError(place, [...new Set(sentences)].join('\n'))
  }
}

const unlisted = new Map() // whether files are there, by type and folder; the list ends at some depth and number
const marked = new Map() // what is told of folders, by the node that it stands on

async function look(key, type, folder) {
  unlisted.set(key, undefined)
  const asked = new URLSearchParams({ kind: KINDS[type], folder, page: '0' })
  const answer = await api.fetchApi(`/tessera/folder?${asked}`, { cache: 'no-store' }).catch(() => undefined)
  const found = answer?.ok ? await answer.json() : undefined
  unlisted.set(key, found?.count > 0)
  markFolders()
}

/** What to tell of a folder that is not there, or that stands there only to say where to put the files. */
function absent(node, hosts) {
  const listed = folderOf(node).options?.values
  const values = typeof listed === 'function' ? listed() : listed
  const folder = sourceWidget(node, 'folder', hosts)?.value
  if (!Array.isArray(values) || folder === undefined) return ''
  const definition = renewed?.[node.type] ?? node.constructor.nodeData
  if (folder !== definition?.input?.required?.folder?.[1]?.placeholder) {
    const key = `${node.type} ${folder}`
    if (values.includes(folder)) return ''
    if (!unlisted.has(key)) look(key, node.type, folder)
    if (unlisted.get(key) !== false) return ''
  }
  return t(ABSENT_WORDS[node.type], { folder })
}

const folderOf = (node) => node.comfyClass in ABSENT_WORDS && widgetOf(node, 'folder')

/** Marks folders that are absent, on the subgraph nodes around them too. */
function markFolders() {
  const said = new Map()
  for (const [node, , hosts] of ourNodes()) {
    const text = folderOf(node) ? absent(node, hosts) : undefined
    for (const place of text === undefined ? [] : [node, ...hosts]) {
      said.set(place, new Set(said.get(place)).add(text))
    }
  }
  for (const place of marked.keys()) if (!said.has(place)) marked.delete(place)
  for (const [place, sentences] of said) {
    const [before, text] = [marked.get(place) ?? '', [...sentences].filter(Boolean).join('\n')]
    if (text !== before && (text || stateOf(place).error === before)) setError(place, text)
    marked.set(place, text)
  }
}

function checkFolders() {
  unlisted.clear()
  markFolders()
}

app.registerExtension({
  name: 'tessera.errors',
  setup() {
    api.addEventListener('execution_error', ({ detail }) => {
      const { node, hosts } = placeOf(detail.node_id)
      // In another workflow a node of the same number may be of another kind. An estimate runs in place of its node.
      const kinds = detail.node_type === 'TesseraTrainingEstimate' ? ['TesseraTrainLora', detail.node_type] : [detail.node_type]
      if (!kinds.includes(node?.type) || isElsewhere(detail.prompt_id)) return
      for (const place of [node, ...hosts]) setError(place, detail.exception_message?.trim())
    })
    const { queuePrompt } = app
    // The server tells a refusal to nobody but the one that asked.
    app.queuePrompt = async function (...rest) {
      for (const [node, , hosts] of ourNodes()) for (const place of [node, ...hosts]) setError(place, '')
      marked.clear()
      checkFolders()
      try {
        return await queuePrompt.apply(this, rest)
      } finally {
        showRefused(app.extensionManager.lastNodeErrors)
      }
    }
    every(EVERY, () => [...marked.values()].some(Boolean) && markFolders())
  },
  nodeCreated(node) {
    const folder = folderOf(node)
    if (!folder) return
    after(folder, () => {
      setError(node, '')
      marked.delete(node)
      markFolders()
    })
  },
  afterConfigureGraph: checkFolders,
  refreshComboInNodes(definitions) {
    renewed = definitions
    setTimeout(checkFolders) // the lists are renewed by then
  },
})
