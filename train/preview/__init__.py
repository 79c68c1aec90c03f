"""Previews during training and charts after it."""
