"""`ringdp bench`: collectives timed beside other libraries', predictions and the physical bound.

run        interleaves rounds of every contender, and makes rows of the times
 ├ groups    each contender's processes: started, commanded, ended
 │  └ worker   one rank of a contender: rewrites, times, checks
 │     └ ours, torchs, mpi, probe   how each contender is called
 ├ cases     what a collective is given and must give, and the bytes that must move
 └ bound     the physical bound; rows: what is measured, what the cost model predicts

kernels    the same for kernels, beside torch's ways and a copy; kernel_cases: what they are given
error      how far sums are from float64's
"""
