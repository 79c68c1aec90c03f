"""In-place writes of ComfyUI's blocks, made out of place for autograd."""
