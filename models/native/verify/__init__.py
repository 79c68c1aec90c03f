"""ComfyUI's own forward over the weights of a run, to compare the training forward with."""
