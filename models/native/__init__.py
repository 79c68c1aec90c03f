"""Any other model, through ComfyUI's own forward."""
