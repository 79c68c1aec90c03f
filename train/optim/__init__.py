"""Optimizers, schedules, gradient limits and weight averages."""
