"""Entries of a compile report: graphs, causes of breaks and recompiles, guards, and seconds."""
