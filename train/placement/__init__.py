"""Placement of the model, its blocks and its LoRA for training."""
