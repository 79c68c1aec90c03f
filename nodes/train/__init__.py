"""Train LoRA and what it needs of the server."""
