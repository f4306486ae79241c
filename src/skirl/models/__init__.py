"""Loading, roles, audio families, packed forward pass."""
