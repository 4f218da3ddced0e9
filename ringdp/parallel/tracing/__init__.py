"""What a trace sees of an engine."""
