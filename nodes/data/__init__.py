"""Nodes that read folders and prepare training data."""
