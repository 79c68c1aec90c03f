"""Nodes that look through a folder before training, and the routes with which masks are drawn."""
