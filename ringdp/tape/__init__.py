"""Records what a run does and when, on each rank, and merges it into one file for Perfetto.

sources   objects that can report what they do. Each joins once and records only while a trace runs,
          so there is no cost and no branch without a trace
recorder  one process's spans and counters, on the clock that all processes of a host share
meeting   ranks agree on an epoch, on the clocks of other hosts, and on whose part exists
chrome    spans and counters as Chrome-trace events
parts     a rank's part as a file, and the merged file
"""
