"""Estimate of a run: its time, memory and disk, from two steps."""
