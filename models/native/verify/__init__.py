"""ComfyUI's own forward over the weights of a run, as a reference for the training forward."""
