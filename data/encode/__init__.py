"""Encoding of crops and captions with VAE and text encoders."""
