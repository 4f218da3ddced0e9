"""Measurements: `suite` writes them, `readme` makes tables and plots of them."""

import time

BEGUN = time.monotonic()  # before torch is imported, which may take a cold machine half a minute
