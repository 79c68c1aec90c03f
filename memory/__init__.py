"""Where frozen weights live while a run uses them."""
