import type { ComfyApp } from '@comfyorg/comfyui-frontend-types'

export declare const app: ComfyApp
