"""`ringdp report`: renders a trace as one self-contained HTML page."""
