"""Preparation of training data: checks, jobs of encoding, and samples from ready latents."""
