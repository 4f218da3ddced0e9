"""The demo's GPT: its size, its seed, causality, and repeatable sampling."""

import torch

from ringdp.cli import gpt

SHAPE = gpt.Shape(context=16, width=32, heads=2, blocks=2)


def test_the_number_of_parameters_is_the_documented_formula() -> None:
    d, blocks, context = SHAPE.width, SHAPE.blocks, SHAPE.context
    count = sum(p.numel() for p in gpt.build(SHAPE, 0).parameters())
    assert count == blocks * (12 * d * d + 13 * d) + 256 * d + context * d + 2 * d


def test_the_default_shape_has_one_to_three_million_parameters() -> None:
    count = sum(p.numel() for p in gpt.build(gpt.Shape(64), 0).parameters())
    assert 1_000_000 < count < 3_000_000


def test_a_seed_fixes_every_bit() -> None:
    pairs = zip(gpt.build(SHAPE, 7).parameters(), gpt.build(SHAPE, 7).parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(gpt.build(SHAPE, 7).token.weight, gpt.build(SHAPE, 8).token.weight)


def test_predictions_do_not_depend_on_later_bytes() -> None:
    model = gpt.build(SHAPE, 0)
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 10:] = 200
    assert torch.equal(model(tokens)[0, :10], model(changed)[0, :10])
    assert not torch.equal(model(tokens)[0, 10:], model(changed)[0, 10:])


def test_an_untrained_model_has_the_loss_of_guessing() -> None:
    rows = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(0))
    loss = gpt.next_byte_loss(gpt.build(SHAPE, 0), rows).item()
    assert abs(loss - torch.tensor(256.0).log().item()) < 0.5


def test_sampling_is_repeatable_and_may_exceed_the_context() -> None:
    model = gpt.build(SHAPE, 0)
    written = gpt.write(model, SHAPE.context, b"ab", 20, seed=1)
    assert len(written) == 22
    assert written.startswith(b"ab")
    assert written == gpt.write(model, SHAPE.context, b"ab", 20, seed=1)
    assert written != gpt.write(model, SHAPE.context, b"ab", 20, seed=2)
