"""Options of a run, as frozen dataclasses that check their values when they are made."""
