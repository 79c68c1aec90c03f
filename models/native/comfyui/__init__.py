"""Ways into ComfyUI's blocks, and leftovers of its sampling."""
