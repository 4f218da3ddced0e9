"""NCCL as a transport: our schedules by grouped sends and receives, through CuPy's binding."""
