"""ComfyUI's queue, in which trainings let other prompts pass."""
