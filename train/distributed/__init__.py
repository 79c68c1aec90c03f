"""One run on several devices, a process for each."""
