// The nodes of this pack in the open workflow, those in subgraphs too.
import { app } from '../../../../scripts/app.js'
import { api } from '../../../../scripts/api.js'

const root = () => app.rootGraph ?? app.graph

export const isOurs = (node) => Boolean(node?.type?.startsWith('Tessera'))

/**
 * Each of our nodes, the path by which the server names it (ids of nodes in subgraphs are such as 12:5), and the subgraph
 * nodes that it is in, the outermost first.
 * @param {any} graph
 * @returns {Generator<[any, string, any[]]>}
 */
export function* ourNodes(graph = root(), before = '', hosts = []) {
  for (const node of graph?.nodes ?? []) {
    if (isOurs(node)) yield [node, `${before}${node.id}`, hosts]
    if (node.subgraph) yield* ourNodes(node.subgraph, `${before}${node.id}:`, [...hosts, node])
  }
}

/** The node of ours that the server names, and the subgraph nodes that it is in. In another workflow that was opened
 * meanwhile the same id may be any node's: then there is none. */
export function placeOf(path) {
  let graph = /** @type {any} */ (root())
  const nodes = []
  for (const id of String(path).split(':')) {
    const node = graph?.getNodeById(id)
    nodes.push(node)
    graph = node?.subgraph
  }
  const node = nodes.pop()
  return isOurs(node) ? { node, hosts: nodes } : { hosts: [] }
}

export const nodeAt = (path) => placeOf(path).node

/** The node that gives the first such input, and the subgraph nodes that it is in; none where nothing does. */
export function inFront({ node, hosts }, isIt) {
  const link = node.graph?.getLink(node.inputs?.find(isIt)?.link)
  const { outputNode, subgraphInput } = link?.resolve(node.graph) ?? {}
  if (outputNode) return { node: outputNode, hosts }
  if (!subgraphInput || !hosts.length) return undefined
  return inFront({ node: hosts.at(-1), hosts: hosts.slice(0, -1) }, ({ name }) => name === subgraphInput.name)
}

const queued = new WeakMap() // ids of the prompts that this page queued, by the workflow that they are of
const STORED = 'tessera.queued' // for a reload of the page: the paths of those workflows, by the prompt's id
const MOST_STORED = 100
const earlier = stored()
let executed // id of the prompt that the server executes for this page

function stored() {
  try {
    return Object.fromEntries(JSON.parse(sessionStorage.getItem(STORED) ?? '[]'))
  } catch {
    return {} // not ours, or the browser allows no storage
  }
}

function store(prompt, path) {
  try {
    const entries = [...Object.entries(stored()), [prompt, path]].slice(-MOST_STORED)
    sessionStorage.setItem(STORED, JSON.stringify(entries))
  } catch {
    // no room, or no storage allowed: then a reload forgets it
  }
}

const { queuePrompt } = api
api.queuePrompt = async function (...rest) {
  const workflow = app.extensionManager.workflow?.activeWorkflow
  const answer = await queuePrompt.apply(this, rest)
  if (workflow && answer?.prompt_id) {
    queued.set(workflow, (queued.get(workflow) ?? new Set()).add(answer.prompt_id))
    store(answer.prompt_id, workflow.path)
  }
  return answer
}
// A page that was reloaded meanwhile hears of no start.
for (const told of ['execution_start', 'progress_state']) {
  api.addEventListener(told, ({ detail }) => (executed = detail.prompt_id))
}
for (const end of ['execution_success', 'execution_error', 'execution_interrupted']) {
  api.addEventListener(end, () => (executed = undefined))
}

/**
 * Tells whether a prompt, without one that which is executed, is of a workflow that is open behind the one on the page,
 * whose nodes may have the same ids.
 */
export function isElsewhere(id) {
  const prompt = id || executed
  const { activeWorkflow, openWorkflows = [] } = app.extensionManager.workflow ?? {}
  const isOf = (workflow) => queued.get(workflow)?.has(prompt) || workflow.path === earlier[prompt]
  return openWorkflows.some((workflow) => workflow !== activeWorkflow && isOf(workflow))
}
