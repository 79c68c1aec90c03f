"""Constant-token buckets: grids, the planner and its plot."""
