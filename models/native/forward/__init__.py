"""The training forward of a model through ComfyUI's own: its blocks, inputs, kernels and weights."""
