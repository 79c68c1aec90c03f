"""Tools for finished LoRAs: merging, resizing, and the difference of two models."""
