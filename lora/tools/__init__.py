"""Tools for finished LoRAs: merging, resizing, conversion, and the difference of two models."""
