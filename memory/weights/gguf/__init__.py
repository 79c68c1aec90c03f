"""Weights of GGUF files: their blocks of codes and scales, and how training holds them."""
