"""One training step: its batches, of which the first is made a step ahead, and the seconds that it takes."""
