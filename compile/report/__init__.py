"""Compile report: graphs, causes of breaks and recompiles, and the gain."""
