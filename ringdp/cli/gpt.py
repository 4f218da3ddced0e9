"""The model that `ringdp train` trains: a byte-level GPT with pre-norm blocks and a tied head.

Parameters, with width d and B blocks: B·(12d² + 13d) + 256·d + context·d + 2d.
There is no dropout, because the stages are compared bit for bit.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 256  # one token per byte


@dataclass(frozen=True)
class Shape:
    """The sizes that determine the number of parameters."""

    context: int
    width: int = 128
    heads: int = 4
    blocks: int = 5


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). The unit that stage 3 gathers and frees."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:  # [rows, time, width] in and out
        x = x + self._attention(self.attention_norm(x))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)))
        return x + torch.as_tensor(self.mlp_out(hidden))

    def _attention(self, x: Tensor) -> Tensor:
        rows, time, width = x.shape
        packed: Tensor = self.query_key_value(x)
        # [3, rows, heads, time, width / heads]
        split = packed.view(rows, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(rows, time, width))
        return out


class GPT(nn.Module):
    """Takes bytes and gives a logit for each possible next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(VOCABULARY, shape.width)  # also the head's weight
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:  # [rows, time] -> [rows, time, VOCABULARY]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


def build(shape: Shape, seed: int) -> GPT:
    """A model whose bits depend on shape and seed alone, in every process."""
    torch.manual_seed(seed)
    model = GPT(shape)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.05)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return model


def elements(model: nn.Module) -> int:
    """The number of elements of all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def next_byte_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean cross entropy in nats of predicting each byte from those before it.

    `rows` is [rows, context + 1].
    """
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), rows[:, 1:].reshape(-1))


@torch.no_grad()
def write(model: nn.Module, context: int, prompt: bytes, count: int, seed: int) -> bytes:
    """Continue the prompt by `count` bytes at temperature 0.7; equal models write equal bytes."""
    draw, device = torch.Generator().manual_seed(seed), next(model.parameters()).device
    written = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([written[-context:]], device=device))[0, -1].cpu()
        odds = torch.softmax(logits / 0.7, dim=0)
        written.append(int(torch.multinomial(odds, 1, generator=draw)))
    return bytes(written)
