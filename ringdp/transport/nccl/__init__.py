"""NCCL as a transport: runs our schedules as grouped sends and receives, by CuPy's binding."""
