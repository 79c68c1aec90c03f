"""Sampling beside ComfyUI's own compile node: seconds of a step, and compilations of a session."""
