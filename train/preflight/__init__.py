"""Checks and notes before the first step."""
