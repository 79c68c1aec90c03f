"""Nodes that load, swap, compile and tune a MODEL."""
