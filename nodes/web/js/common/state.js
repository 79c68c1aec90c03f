// What the page knows of a node, beside what ComfyUI keeps of it: one record a node, of the pack's own nodes and of
// subgraph nodes around them.

/**
 * @typedef {object} NodeState
 * @property {(string | Element | undefined)[]} content Lines and elements that the report shows.
 * @property {Map<string, Element>} panels Of runs, by the path of their Train LoRA.
 * @property {string} [error] A sentence in red above all else.
 * @property {string} [hint] A line on what the node is set to.
 * @property {string[]} [notes] Those of a run's record, on a page that did not see the run begin.
 * @property {string[]} [lines] Said so far by the run that the page saw begin.
 * @property {ReturnType<typeof import('../gallery/tiles.js').makeGallery>} [gallery]
 * @property {{page: number, missing: boolean, folder?: string, endings?: string[], beside?: string[], again?: boolean, asking?: Promise<void>}} [page]
 * Of the gallery: which page of its folder it shows, and the endings of files that the server reads in it, and beside those.
 * @property {{tell(): void, shrink(): void}} [more] Of the widgets behind *more*.
 */

/** @returns {NodeState} */
export const stateOf = (node) => (node.tessera ??= { content: [], panels: new Map() })
