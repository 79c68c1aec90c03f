"""torch.compile: what is compiled, how, and what happened."""
