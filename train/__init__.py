"""LoRA training: preflight checks, objective, optimizer, training loop, checkpoints, validation and previews."""
