"""Execution of the blocks of a run: regions that compile, checkpointing, and the precision of their matmuls."""
