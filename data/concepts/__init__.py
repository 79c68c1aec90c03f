"""Concepts: directions and prompts that a LoRA is trained on by the frozen model's own predictions.

A sample of a concept teaches no picture. Its latent is noised as ever, but the target is a sum of what the model
without the LoRA predicts for other prompts at the same noisy latent, see `prompts.Term`, or comes from a pair of
pictures, see `picture_pairs`.
"""
