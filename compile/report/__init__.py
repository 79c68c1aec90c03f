"""What was compiled, why it recompiled, and what it gained."""
