"""`ringdp plan`: what a rank will hold and send, and how long a step takes, before it is run.

Bytes are the engine's own formulas; times are the schedules' prices along the engine's own order.

command    checks what is asked (options), plans every stage, writes JSON
 ├ models    the model as units: by name, by size, or built without memory
 ├ hardware  α β γ: of a bench file, or of datasheets; what is extrapolated
 ├ stages    bytes, times, the largest model, and which stage to take
 │  └ step     the two clocks
 └ table     what is shown; published: others' figures beside ours
"""
