"""Nodes that save, average and compare LoRAs."""
