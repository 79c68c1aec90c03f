"""Nodes that hold the options of Train LoRA."""
