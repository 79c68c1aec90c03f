"""Helpers independent of training: files, text, random numbers, progress."""
