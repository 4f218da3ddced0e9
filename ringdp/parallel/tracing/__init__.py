"""Engines in traces."""
