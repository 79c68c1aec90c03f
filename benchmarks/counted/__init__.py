"""Kernels, bytes and FLOP of a training step on a GPU, counted without one."""
