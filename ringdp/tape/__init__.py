"""Records what a run does and when, on each rank, and merges it into one file for Perfetto.

recorder  one process's spans and counters, on the clock that all processes of a host share, and the
          objects that report them. Each joins once and records only while a trace runs, so there
          is no cost and no branch without a trace
meeting   ranks agree on an epoch, on the clocks of other hosts, and on whose part exists
chrome    spans and counters as Chrome-trace events
parts     a rank's part as a file, and the merged file
"""
