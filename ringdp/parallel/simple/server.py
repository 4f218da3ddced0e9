"""A parameter server: rank 0 has the optimizer, all others are workers that bring it gradients.

    synchronous     it adds up one gradient of every worker, in the order of ranks, steps, and
                    sends the new parameters to all: the same sum as an all_reduce's
    asynchronous    it steps on every gradient as it comes, and answers its sender alone; meanwhile
                    the others compute with parameters that get old

The staleness of a gradient is how many steps the server has taken since it sent the parameters
that the gradient was made with: 0 where workers take turns, and n − 1 on average where n workers
are equally fast. Dean et al. 2012 (DistBelief), Ho et al. 2013.

Bytes for every gradient, both ways, with Ψ parameters of float32: 4Ψ from the worker, 4Ψ to it. The
server thus sends n·4Ψ where each of n ranks of DDP sends 2·(n − 1)/n·4Ψ.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ringdp.comm import Communicator

SERVER = 0


class RemoteOptimizer:
    """A worker's: `step` sends the gradients to the server and waits for what it makes of them.

    `scale`: what gradients are multiplied by; 1/n makes the server's sum their average.
    """

    def __init__(self, model: nn.Module, comm: Communicator, *, scale: float) -> None:
        self.model, self.comm, self.scale = model, comm, scale

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def step(self) -> None:
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()
        ]
        message = parameters_to_vector(gradients).mul_(self.scale)
        self.comm.send(message, SERVER)
        self.comm.recv(message, SERVER)
        vector_to_parameters(message, self.model.parameters())


def serve(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, steps: int
) -> None:
    """Be the synchronous server for `steps` gradients of every worker."""
    workers = range(1, comm.size)
    total, one = _message(model), _message(model)
    for _ in range(steps):
        for worker in workers:
            comm.recv(total if worker == 1 else one, worker)
            if worker > 1:
                total += one
        parameters = _step(model, optimizer, total)
        for worker in workers:
            comm.send(parameters, worker)


def serve_each(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, steps: int
) -> list[int]:
    """Be the asynchronous server for `steps` gradients of every worker: the staleness of each."""
    gradient = _message(model)
    sent_at = [0] * comm.size  # the server's step when it last answered each rank
    staleness = []
    for now in range(steps * (comm.size - 1)):
        worker = comm.recv(gradient)
        staleness.append(now - sent_at[worker])
        comm.send(_step(model, optimizer, gradient), worker)
        sent_at[worker] = now + 1
    return staleness


def _message(model: nn.Module) -> Tensor:
    return torch.empty_like(parameters_to_vector(model.parameters()).detach())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: Tensor) -> Tensor:
    """Take a step; all parameters."""
    offset = 0
    for p in model.parameters():
        p.grad = gradient[offset : offset + p.numel()].view(p.shape)
        offset += p.numel()
    optimizer.step()
    return parameters_to_vector(model.parameters()).detach()
