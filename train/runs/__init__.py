"""Run folders: their names, files and records, the list of them, and their trash."""
