"""Datasets on disk: folders, pairs and their options."""
