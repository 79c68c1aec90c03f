"""The kinds of adapters, one file each."""
