"""Settings of a run, the machine that it runs on, and the two experts of Wan 2.2."""
