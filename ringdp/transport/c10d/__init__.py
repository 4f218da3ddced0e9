"""The transport over any torch.distributed group, such as gloo between hosts."""
