"""Proof that a run computes what it should: a certificate before its first step, and a check of its final file."""
