// Errors stand on the node that they are about: errors of a run, inputs that the server refused, folders that are
// not there.
import { app } from '../../../scripts/app.js'
import { api } from '../../../scripts/api.js'
import { isElsewhere, ourNodes, placeOf } from './nodes.js'
import { setError } from './report_widget.js'
import { after, ownWidget, widgetOf } from './widgets.js'
import { t } from './words.js'

let renewed // definitions after R; nodes that stand there keep the class of the old ones
const ABSENT_WORDS = {
  TesseraImageFolder: '{folder} is not among the folders that hold pictures.',
  TesseraVideoFolder: '{folder} is not among the folders that hold clips.',
}

/** One of the server's errors of a node, as a sentence. Ours stand behind the name of the input and a dash. */
function refusal({ type, message, details, extra_info }) {
  const input = extra_info?.input_name
  if (type === 'custom_validation_failed') return details?.slice(details.startsWith(`${input} - `) ? input.length + 3 : 0)
  return details ? `${message}: ${details}` : message
}

function showRefused() {
  const said = new Map() // of each node, and of each subgraph around it
  for (const [path, { errors }] of Object.entries(app.extensionManager.lastNodeErrors ?? {})) {
    const { node, hosts } = placeOf(path)
    for (const place of node ? [node, ...hosts] : []) {
      said.set(place, [...(said.get(place) ?? []), ...(errors ?? []).map(refusal).filter(Boolean)])
    }
  }
  for (const [place, sentences] of said) if (sentences.length) setError(place, [...new Set(sentences)].join('\n'))
}

/** Marks a folder that is not in the list, or that stands there only to say where to put the files. */
function checkFolder(node, folder) {
  const listed = folder.options?.values
  const values = typeof listed === 'function' ? listed() : listed
  if (!Array.isArray(values) || !ownWidget(node, 'folder')) return
  const definition = renewed?.[node.type] ?? node.constructor.nodeData
  const placeholder = definition?.input?.required?.folder?.[1]?.placeholder
  const absent = folder.value === placeholder || !values.includes(folder.value)
  setError(node, absent ? `${t(ABSENT_WORDS[node.type], { folder: folder.value })} ${t('Put them there and press R, or choose another folder.')}` : '')
}

const folderOf = (node) => node.comfyClass in ABSENT_WORDS && widgetOf(node, 'folder')

function checkFolders() {
  for (const [node] of ourNodes()) if (folderOf(node)) forget(node)
}

/** Takes away the last error; an absent folder is marked again. */
function forget(node) {
  const folder = folderOf(node)
  if (folder) checkFolder(node, folder)
  else setError(node, '')
}

app.registerExtension({
  name: 'tessera.errors',
  setup() {
    api.addEventListener('execution_error', ({ detail }) => {
      const { node, hosts } = placeOf(detail.node_id)
      // In another workflow a node of the same number may be of another kind.
      if (node?.type !== detail.node_type || isElsewhere(detail.prompt_id)) return
      for (const place of [node, ...hosts]) setError(place, detail.exception_message?.trim())
    })
    const { queuePrompt } = app
    // The server tells a refusal to nobody but the one that asked.
    app.queuePrompt = async function (...rest) {
      for (const [node, , hosts] of ourNodes()) {
        forget(node)
        for (const host of hosts) setError(host, '')
      }
      try {
        return await queuePrompt.apply(this, rest)
      } finally {
        showRefused()
      }
    }
  },
  nodeCreated(node) {
    const folder = folderOf(node)
    if (folder) after(folder, () => checkFolder(node, folder))
  },
  afterConfigureGraph: checkFolders,
  refreshComboInNodes(definitions) {
    renewed = definitions
    setTimeout(checkFolders) // the lists are renewed by then
  },
})
