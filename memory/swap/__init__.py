"""Block swap: plan, ring of slots, training and inference."""
