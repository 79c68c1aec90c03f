"""run.py: run a workflow from a terminal. Only the standard library is imported until ComfyUI starts."""
