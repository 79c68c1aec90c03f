"""torch.compile of models: regions, settings, and reports."""
