"""Weights of GGUF files: block formats of codes and scales, and their storage while training."""
