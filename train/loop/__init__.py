"""Training loop: the steps with their retries, and the saves of a run."""
