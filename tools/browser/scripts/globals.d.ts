// Of the frontend's globals what this pack uses; its types name none of them.
import type { ComfyApp } from '@comfyorg/comfyui-frontend-types'

declare global {
  const LiteGraph: {
    NODE_TEXT_SIZE: number
    NODE_TITLE_HEIGHT: number
    NODE_WIDTH: number
    /** Nodes 2.0 draws the nodes, not the canvas. */
    vueNodesMode: boolean
    createNode(type: string): NonNullable<ReturnType<ComfyApp['graph']['getNodeById']>>
  }

  interface HTMLElement {
    /** Of Vue, on the element that it is mounted in. */
    __vue_app__?: any
  }
}
