// The nodes of this pack in the open workflow, those in subgraphs too.
import { app } from '../../../scripts/app.js'

const root = () => app.rootGraph ?? app.graph

export const isOurs = (node) => Boolean(node?.type?.startsWith('Tessera'))

/** Pairs of each of our nodes and the path by which the server names it: ids of nodes in subgraphs are such as 12:5. */
export function* ourNodes(graph = root(), before = '') {
  for (const node of graph?.nodes ?? []) {
    if (isOurs(node)) yield [node, `${before}${node.id}`]
    if (node.subgraph) yield* ourNodes(node.subgraph, `${before}${node.id}:`)
  }
}

/** The node of ours that the server names. In another workflow that was opened meanwhile the same id may be any
 * node's. */
export function nodeAt(path) {
  let graph = root()
  let node
  for (const id of String(path).split(':')) {
    node = graph?.getNodeById(id)
    graph = node?.subgraph
  }
  return isOurs(node) ? node : undefined
}
