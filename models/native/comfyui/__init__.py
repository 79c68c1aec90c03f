"""Hooks into ComfyUI's blocks, and removal of state left by its sampling."""
