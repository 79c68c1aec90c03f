"""FLUX.1, with Kontext, and FLUX.2."""
