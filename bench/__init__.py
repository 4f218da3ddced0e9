"""Measurements: `suite` writes them, `readme` makes tables and plots of them."""
