"""`ringdp plan`: what a rank will hold and send, and how long a step takes, before it is run.

Bytes are the engine's own formulas; times are the schedules' prices along the engine's own order.
"""
