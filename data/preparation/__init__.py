"""Preparation of training data: checks, what is encoded, and samples from ready latents."""
