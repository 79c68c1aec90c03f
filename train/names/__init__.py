"""Module names of each family."""
