"""The tensors that a model's modules take, return and leave."""
