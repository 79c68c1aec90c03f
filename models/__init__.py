"""Model families: training forwards over the weights that ComfyUI holds."""
