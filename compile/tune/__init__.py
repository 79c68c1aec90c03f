"""The search of Tune Compile."""
