"""One run on several devices, with one process per device."""
