"""Decoding of images, videos and masks."""
