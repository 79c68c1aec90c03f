"""Descriptions of the shared workflows, a function each, by model family or purpose."""
