"""Measurements: `suite` and the other benches write them, `readme` renders tables and plots."""

import time

BEGUN = time.monotonic()  # before torch is imported, which may take a cold machine half a minute
