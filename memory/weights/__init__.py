"""Frozen weights as they are stored, and their residency."""
