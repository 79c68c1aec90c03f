"""A training step beside ComfyUI's own training node: seconds, memory, counts."""
