"""Model families: how the weights that ComfyUI holds are run for training."""
