"""Training states, resume and metadata."""
