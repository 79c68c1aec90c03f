"""Bounded reading of texts and files that strangers wrote."""
