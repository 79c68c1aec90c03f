"""Memory: frozen weights on host and device, block swap, activations."""
