"""Workflows through the executor of ComfyUI itself."""
