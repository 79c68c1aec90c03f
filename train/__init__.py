"""Training: data, buckets, LoRA networks, objective, optimizer and the loop."""
