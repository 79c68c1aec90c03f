"""Placement of the model and its LoRA for training, and the choice of its memory."""
