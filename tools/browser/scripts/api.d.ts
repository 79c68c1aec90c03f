import type { ComfyApi } from '@comfyorg/comfyui-frontend-types'

/** The frontend's own, with the names of the events that this pack sends and of those that its types leave out. */
export declare const api: Omit<ComfyApi, 'addEventListener'> & {
  addEventListener(name: string, listen: (event: CustomEvent) => void): void
}
