"""Targets that the frozen model predicts itself, for sliders and erasures."""
