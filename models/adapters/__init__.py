"""Adapter algorithms, one file each."""
