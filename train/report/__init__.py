"""Reports of a run: its observer, and its errors in sentences."""
