"""Languages, text normalisation and edit counts, shared by rewards and evaluation."""
