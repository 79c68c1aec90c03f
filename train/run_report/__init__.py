"""Report of a run: one page and one picture beside its LoRA, and two runs side by side."""
