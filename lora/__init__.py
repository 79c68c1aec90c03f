"""LoRA networks: trained adapters, warm start, and LoRA files."""
