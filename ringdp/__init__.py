"""ringdp."""
