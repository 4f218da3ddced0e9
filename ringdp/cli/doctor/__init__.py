"""`ringdp doctor`: whether ringdp can run here, and what a running job does."""
