"""Training data: samples, cache, and batches."""
