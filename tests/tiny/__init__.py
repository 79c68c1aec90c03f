"""Tiny checkpoints with random weights from fixed seeds, in the formats that ComfyUI's own loaders read."""
