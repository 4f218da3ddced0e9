"""Measurements: rows are dataclasses, written as JSON; what README shows is made from them."""
