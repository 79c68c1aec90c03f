"""The registry of families, and a whole model whose blocks are swapped."""
