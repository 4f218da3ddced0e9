"""Any torch.distributed group as a transport: gloo, between hosts too."""
