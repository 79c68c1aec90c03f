"""Activations: checkpointing and offload."""
