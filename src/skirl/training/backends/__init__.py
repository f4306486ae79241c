"""What runs the optimizer."""
