"""Formats of stored weights: quantised layouts with their tensors, and the blocks of GGUF files."""
