"""`ringdp plan`: predicts what a rank holds and sends, and how long a step takes.

Bytes come from the engine's own formulas; times are the schedules' prices in the engine's order.

command    checks the options, plans every stage, writes JSON
 ├ models    the model as units: by name, by size, or built without memory
 ├ hardware  α β γ from bench files or datasheets; what is extrapolated
 ├ stages    bytes, times, the largest model, and the recommended stage
 │  └ step     simulates a step on two clocks
 └ table     prints the tables; published: published figures beside the formulas
"""
