"""Checks that a run computes correctly: a certificate before its first step, and a check of its final file."""
