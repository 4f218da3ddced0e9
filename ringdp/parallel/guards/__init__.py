"""What guards an engine's parameters against what would go wrong without a word."""
