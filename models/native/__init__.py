"""All other models, through ComfyUI's own forward."""
