"""Checks of the training forward before the first step."""
