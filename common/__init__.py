"""Parts without an idea of training: files, text, random numbers, progress."""
