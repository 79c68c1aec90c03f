"""LoRA files: formats, metadata and conversion."""
