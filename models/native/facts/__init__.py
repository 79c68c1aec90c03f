"""Facts about models that train with ComfyUI's own forward, by name, and rules for unnamed models."""
