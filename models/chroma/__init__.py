"""Chroma: FLUX's blocks without pooled text, modulated by one network."""
