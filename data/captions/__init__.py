"""Captions: variants, tags and wildcards."""
