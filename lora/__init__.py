"""LoRA networks: what is trained, how it starts, and the files it is saved in."""
