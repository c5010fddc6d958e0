"""What runs on the machine: the model, its serving system, the store; above planes and cmnet."""
