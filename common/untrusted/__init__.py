"""Bounded reading of untrusted texts and files."""
