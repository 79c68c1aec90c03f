"""Facts about models that train with ComfyUI's own forward, by name, and rules for models that nobody has named."""
