"""`ringdp bench`: times collectives beside other libraries, predictions and the physical bound.

run        interleaves rounds of all contenders, and turns the times into rows
 ├ groups    starts, commands and ends each contender's processes
 │  └ worker   one rank of a contender: rewrites, times, checks
 │     └ contenders, mpi   how each library is called
 ├ cases     inputs and correct results of each collective, and the bytes that must move
 └ bound     the physical bound; rows: measurements and the cost model's predictions

kernels    the same for kernels, beside torch's ways and a copy; kernel_cases: their inputs
error      how far sums are from float64's
"""
