"""Scripts that answer one question each."""
