"""Checks of every path on a small FLUX: their cases, and how each is judged."""
