"""One training step: its batches, the first of them made one step ahead, its losses and its timing."""
