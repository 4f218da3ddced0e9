"""The tensors that go into modules and come out."""
