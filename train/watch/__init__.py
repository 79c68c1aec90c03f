"""Watchers between the steps of a run: validation and previews."""
