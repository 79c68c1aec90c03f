"""The parts of `dev.py card`."""
