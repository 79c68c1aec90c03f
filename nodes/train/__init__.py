"""Train LoRA and its server routes."""
