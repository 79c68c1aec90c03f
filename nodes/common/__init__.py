"""Helpers shared by several nodes."""
