"""What a run did and when: recorded by each rank, merged into one file that Perfetto opens.

sources   whatever has something to tell joins once, and is asked to record only while a trace
          runs; so there is no cost and no branch where there is no trace
recorder  one process's spans and counters, on the clock that all processes of a host share
meeting   the ranks agree on an epoch, on clocks of other hosts, and on whose part is there
chrome    spans and counters as Chrome-trace events, and what such a file must look like
parts     a rank's part as a file, and the parts as one
"""
