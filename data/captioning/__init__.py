"""Captions that are written: by hand in the gallery, and by models."""
