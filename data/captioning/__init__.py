"""Captions that are written: by hand in the gallery."""
