"""run.py: a workflow from a terminal. Until ComfyUI is started nothing but the standard library is imported."""
