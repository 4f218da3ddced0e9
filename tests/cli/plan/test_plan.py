"""`ringdp plan` as a command: figures, JSON, recommendations and refused options."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ringdp.cli.main import main
from ringdp.cli.plan.command import check, precision
from ringdp.cli.plan.models import read
from ringdp.cli.plan.options import Options
from ringdp.cli.plan.published import DEEPSPEED, ZERO, figures
from ringdp.cli.plan.stages import EXACT, MOST_RANKS, held, largest, recommend, row

HERE = Path(__file__).with_name("models_here.py")
BENCH = Path(__file__).parents[3] / "bench" / "results" / "all_reduce.json"

OTHER = BENCH.with_name("error.json")


def planned(**given):
    options = Options(**given)
    model, setting = read(options.model, precision(options)), check(options)
    rows = [row(model, stage, setting) for stage in options.stages]
    return model, setting, rows, recommend(rows, model, setting)


def test_published_figures_are_reproduced():
    zero = [f for f in figures() if f.source == ZERO]
    assert [f.published for f in zero] == [120, 31.4, 16.6, 1.9]
    assert [float(f"{f.theirs:.1f}") for f in zero] == [120, 31.4, 16.6, 1.9]
    theirs = [f for f in figures() if f.source == DEEPSPEED]
    assert [float(f"{f.theirs:.2f}") for f in theirs] == [f.published for f in theirs]


def test_the_engines_bytes_are_shown_with_the_published_ones():
    """In bytes, between steps, for 7.5e9 parameters on 64 ranks: 18Ψ, 4Ψ + 16Ψ/n, 2Ψ + 16Ψ/n,
    18Ψ/n."""
    psi = 7.5
    expected = [18 * psi, 4 * psi + psi / 4, 2 * psi + psi / 4, 18 * psi / 64]
    zero = [f.engine for f in figures() if f.source == ZERO]
    assert zero == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_the_largest_model_fits_and_a_larger_one_does_not(ranks):
    """On many ranks it has more elements than a rank has bytes."""
    model, setting, rows, _ = planned(model="params=1e9/64", ranks=ranks, memory="16G")
    for r in rows:
        assert r.largest == largest(model, r.stage, setting)
        assert sum(held(model.scaled(r.largest), r.stage, ranks)) <= setting.memory
        above = r.largest + 2 * r.largest // EXACT
        assert sum(held(model.scaled(above), r.stage, ranks)) > setting.memory
    assert (rows[3].largest > setting.memory) == (ranks > 8)
    assert [r.fits for r in rows] == [r.largest >= model.elements for r in rows]


def test_the_fastest_stage_that_fits_is_recommended():
    _, _, rows, message = planned(model="llama-7b")
    assert [r.fits for r in rows] == [False, True, True, True]
    assert message.startswith("stage 1: the least predicted time")
    assert message.endswith("stage 0 does not fit")


def test_if_no_stage_fits_the_ranks_needed_are_named():
    model, setting, _, message = planned(model="llama-70b", ranks=8)
    ranks = int(message.split()[-2])
    assert message == f"none fits; stage 3 would with {ranks} ranks"
    assert sum(held(model, 3, ranks)) <= setting.memory < sum(held(model, 3, ranks // 2))
    ranks = MOST_RANKS // 2 + 8  # twice as many would be refused
    message = planned(model="params=1e14/1", ranks=ranks)[3]
    assert message == f"none fits; nor would stage 1 with up to {ranks} ranks"


def test_replicas_are_priced_by_both_networks():
    """Where a node holds a model, its links carry what a model's shards exchange; between nodes are
    the all_reduces of the shards only. Stage 0 is as without."""
    given = {"model": "llama-7b", "ranks": 64, "alpha": 0.0}
    alone, within, across = (
        planned(**given | more)[2]
        for more in ({}, {"ranks": 8}, {"network": f"{10**9}GB", "shard_size": 8})
    )
    model, setting, rows, _ = planned(**given, shard_size=8)
    assert rows[0] == alone[0]
    for r, w, a in zip(rows[1:], within[1:], across[1:], strict=True):
        held_ = held(model, r.stage, 8, replicas=8)
        assert r.memory == held_
        assert sum(held_) == pytest.approx(w.total, rel=1e-4)
        shards = 2 * model.elements / 8  # bytes of gradients in bf16
        between = 2 * shards * 7 / 8 * setting.network.machine.beta
        assert r.step.communication == pytest.approx(w.step.communication + between, rel=0.03)
        assert a.step.communication == pytest.approx(w.step.communication, rel=0.03)
        assert r.step.total < alone[r.stage].step.total / 3
    _, _, _, message = planned(model="llama-70b", ranks=64, shard_size=2)
    ranks = int(message.split()[-4])
    assert message == f"none fits; stage 3 would with {ranks} ranks a replica"


def test_gathers_from_pieces_are_priced_by_the_nodes_links():
    """In stage 3, where one of three passes of all bytes then leaves the network between nodes."""
    given = {"model": "llama-7b", "ranks": 64, "alpha": 0.0}
    (*same, far), (*others, near), (*_, kept) = (
        planned(**given, reshard_size=size)[2] for size in (None, 8, 1)
    )
    assert others == same
    model, setting, _, _ = planned(**given, reshard_size=8)
    assert near.memory == held(model, 3, 64, near=8)
    psi = 2 * model.elements  # bytes in bf16
    assert near.memory.gathered_peak - far.memory.gathered_peak == pytest.approx(psi / 8, rel=0.1)
    assert kept.memory.gathered_peak == pytest.approx(psi, rel=0.01)
    assert near.sent - kept.sent == pytest.approx(psi * 7 / 8, rel=0.1)
    assert far.sent - kept.sent == pytest.approx(psi * 63 / 64, rel=0.1)
    beta, links = setting.network.machine.beta, setting.nearby.machine.beta
    saved = far.step.communication - near.step.communication
    assert saved == pytest.approx(psi * (63 / 64 * beta - 7 / 8 * links), rel=0.1)
    both = planned(**given, shard_size=32, reshard_size=8)[2][3]
    assert both.memory == held(model, 3, 32, replicas=2, near=8)


def test_a_larger_model_fits_where_gathers_yield():
    """In shared memory, which the bench file measures, they do."""
    model = read("params=1e6/8", precision(Options(model="")))
    least, more = (sum(held(model, 3, 4, yields=yields)) for yields in (True, False))
    assert least < more
    given = {"model": "params=1e6/8", "stage": "3", "memory": str(least)}
    _, _, (fits,), _ = planned(**given, ranks=4, network=str(BENCH), flops=1e11)
    _, _, (does_not,), _ = planned(**given, ranks=4)
    assert fits.fits
    assert fits.largest >= model.elements * (1 - 1 / EXACT)
    assert not does_not.fits
    assert does_not.largest < model.elements
    assert planned(**given, ranks=2, network=str(BENCH), flops=1e11)[3].endswith(
        "would with 4 ranks"
    )
    assert planned(**given, ranks=2)[3].endswith("would with 8 ranks")


def test_many_small_buffers_are_priced_as_one_that_exceeds_the_cache(tmp_path):
    """Per byte, many small buffers cost no less than one of 64 MiB, since they evict one another;
    on GPUs they do."""
    report = json.loads(BENCH.read_text(encoding="utf-8"))
    ours = [r for r in report["rows"] if r["transport"] == "shm" and r["registered"]]
    most = max(ours, key=lambda r: r["bytes"])
    for model in ("gpt2", "params=124e6/100"):
        given = {"model": model, "ranks": 2, "flops": 1e11, "stage": "0"}
        found, _, (row_,), _ = planned(**given, network=str(BENCH))
        least = 2 * found.elements * most["p50_us"] / 1e6 / most["bytes"]  # in bf16
        assert row_.step.communication >= 0.9 * least
    gpus = tmp_path / "gpus.json"
    rows = [r | {"transport": "nccl"} for r in ours]
    gpus.write_text(json.dumps(report | {"rows": rows}), encoding="utf-8")
    assert planned(**given, network=str(gpus))[2][0].step.communication < 0.9 * least


def test_an_optimizer_in_host_memory_is_priced_at_its_rate(tmp_path):
    """30 bytes per element, at the rate at which a rank reads and writes the longest registered
    buffer."""
    given = {"model": "gpt2", "ranks": 2, "flops": 1e11, "precision": "fp32"}
    model, _, rows, _ = planned(**given, network=str(BENCH))
    path, report = tmp_path / "b.json", json.loads(BENCH.read_text(encoding="utf-8"))
    longest = max((r for r in report["rows"] if r["registered"]), key=lambda r: r["bytes"])
    whole = 30 * model.elements * longest["p50_us"] * 1e-6 / (2 * longest["bytes"])
    assert [r.step.optimizer for r in rows] == pytest.approx([whole, *[whole / 2] * 3], rel=0.01)
    over = [r | {"transport": "nccl"} for r in report["rows"] if r["transport"] == "shm"]
    path.write_text(json.dumps(report | {"rows": over}), encoding="utf-8")
    assert planned(**given, network=str(path))[2][0].step.optimizer < whole / 20


def test_the_json_equals_the_tables(tmp_path, capsys):
    out = tmp_path / "plan.json"
    arguments = ["plan", "--model", f"{HERE}:net", "--ranks", "2", "--network", str(BENCH)]
    assert main([*arguments, "--flops", "1e11", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    found = json.loads(out.read_bytes())
    assert [s["stage"] for s in found["stages"]] == [0, 1, 2, 3]
    for s in found["stages"]:
        time = s["seconds"]
        assert s["memory_total"] == sum(s["memory"].values())
        assert math.isclose(
            time["total"], time["compute"] + time["exposed"] + time["optimizer"], rel_tol=1e-12
        )
        assert math.isclose(time["communication"], time["hidden"] + time["exposed"], rel_tol=1e-12)
    optimizer = "the optimizer, at the bytes/s of the largest collective"
    more = "all_gather, reduce_scatter, measured all_reduce"
    assert found["stages"][0]["extrapolated"] == [optimizer]
    assert found["stages"][3]["extrapolated"] == [more, optimizer]
    assert f"Extrapolated: {more}; {optimizer}." in shown
    assert f"Recommended: {found['recommendation']}." in shown


def test_with_a_bench_file_any_number_of_ranks_is_accepted(tmp_path):
    out = tmp_path / "plan.json"
    arguments = ["plan", "--model", "gpt2", "--ranks", "12", "--json", str(out)]
    assert main([*arguments, "--network", str(BENCH), "--flops", "1e11"]) == 0
    assert json.loads(out.read_bytes())["per_node"] is None
    assert main([*arguments, "--per-node", "6"]) == 0
    assert json.loads(out.read_bytes())["per_node"] == 6


def test_a_small_model_is_shown_in_small_units(capsys):
    arguments = ["plan", "--model", f"{HERE}:net", "--ranks", "2", "--stage", "3", "--memory", "1M"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    total = sum(held(planned(model=f"{HERE}:net", ranks=2)[0], 3, 2))
    assert (
        "Held by a rank beside activations, kB; parameters of the largest model that fits" in shown
    )
    assert f" {total / 1e3:,.3f} " in shown
    assert "µs predicted" in shown


@pytest.mark.parametrize(("given", "size"), [("80GB", 80e9), ("80g", 80e9), ("80GiB", 80 << 30)])
def test_memory_units_are_decimal_except_gib(given, size, capsys):
    """In powers of 1000, except GiB."""
    assert check(Options(model="", memory=given)).memory == size
    assert main(["plan", "--model", "gpt2", "--memory", given]) == 0
    assert f"memory {size / 1e9:.4g} GB" in capsys.readouterr().out


def test_published_figures_are_printed(capsys):
    assert main(["plan", "--published"]) == 0
    shown = capsys.readouterr().out
    for line in ("120         120.00        135.00", "15.93          15.93"):
        assert line in shown


GPT2_APART = ["--model", "gpt2", "--ranks", "2", "--shard-size", "1"]
REFUSED = {
    "nothing": ([], "plan takes either --model, such as gpt2, or --published"),
    "both": (["--model", "gpt2", "--published"], "plan takes either"),
    "published and more": (["--published", "--ranks", "8"], "--published takes no other option"),
    "unknown model": (["--model", "gpt9"], "--model is 'gpt9'; allowed: gpt2"),
    "many units": (["--model", f"params=1/{'9' * 5000}"], "99'; allowed: params=7e9, which is in"),
    "ranks 0": (["--model", "gpt2", "--ranks", "0"], "--ranks is 0; allowed"),
    "part of a node": (["--model", "gpt2", "--ranks", "12"], "a multiple of --per-node"),
    "no rank a replica": (["--model", "gpt2", "--shard-size", "0"], "--shard-size is 0; allowed"),
    "parts of nodes": (
        ["--model", "gpt2", "--ranks", "24", "--shard-size", "3"],
        "--shard-size is 3; allowed: what divides 24 ranks, and fills nodes of 8",
    ),
    "replicas of a bench": (
        [*GPT2_APART, "--flops", "1e11", "--network", str(BENCH)],
        "--shard-size is 1; allowed: none with",
    ),
    "more than a replica": (
        ["--model", "gpt2", "--shard-size", "8", "--reshard-size", "16"],
        "--reshard-size is 16; allowed: a whole number from 1 to 8",
    ),
    "pieces in parts of nodes": (
        ["--model", "gpt2", "--shard-size", "8", "--reshard-size", "3"],
        "--reshard-size is 3; allowed: what divides 8 ranks, and fills nodes of 8",
    ),
    "stage 4": (["--model", "gpt2", "--stage", "4"], "--stage is '4'; allowed"),
    "precision": (["--model", "gpt2", "--precision", "int8"], "--precision is 'int8'; allowed"),
    "reduce": (["--model", "gpt2", "--reduce", "int8"], "--reduce is 'int8'; allowed"),
    "network": (["--model", "gpt2", "--network", "wet"], "--network is 'wet'; allowed"),
    "network of one node": (
        ["--model", "gpt2", "--ranks", "8", "--network", "100Gb"],
        "--network is '100Gb', between nodes; allowed: none with --ranks 8, which are on one node "
        "of 8 (--per-node)",
    ),
    "nodes of a bench": (
        ["--model", "gpt2", "--network", str(BENCH), "--per-node", "8"],
        "--per-node is 8; allowed: none with",
    ),
    "no GPU": (
        ["--model", "gpt2", "--network", str(BENCH)],
        "measured in a host's memory; allowed: with --flops, what a rank computes there",
    ),
    "two rates": (
        ["--model", "gpt2", "--flops", "1e12", "--utilisation", "0.5"],
        "plan takes either --flops or --utilisation",
    ),
    "no file": (["--model", "gpt2", "--network", "/no.json"], "--json`: No such file"),
    "another file": (["--model", "gpt2", "--network", str(OTHER)], "--json`: it is something else"),
    "device": (["--model", "gpt2", "--device", "tpu"], "--device is 'tpu'; allowed: a100"),
    "utilisation": (["--model", "gpt2", "--utilisation", "2"], "--utilisation is 2.0; allowed"),
    "little use": (["--model", "gpt2", "--utilisation", "1e-300"], "--utilisation is 1e-300;"),
    "flops": (["--model", "gpt2", "--flops", "nan"], "--flops is nan; allowed"),
    "few flops": (["--model", "gpt2", "--flops", "1e-300"], "--flops is 1e-300; allowed: 1 to"),
    "slow": (["--model", "gpt2", "--alpha", "1e308"], "--alpha is 1e+308; allowed: 0 to 60 s"),
    "no rate within a node": (
        ["--model", "gpt2", "--ranks", "8", "--network", "wet"],
        "--network is 'wet'; allowed: bits a second",
    ),
    "fast": (["--model", "gpt2", "--network", f"{'9' * 400}Gb"], "as in 50GB, a number from 1e-06"),
    "memory": (["--model", "gpt2", "--memory", "big"], "--memory is 'big'; allowed"),
    "memory of no unit": (
        ["--model", "gpt2", "--memory", "80"],
        "--memory is '80', which is 80 bytes; allowed: 1MB to 1,000,000GB, with its unit",
    ),
    "alpha": (["--model", "gpt2", "--alpha", "-1"], "--alpha is -1.0; allowed"),
    "algorithm": (["--model", "gpt2", "--algorithm", "tree"], "--algorithm is 'tree'; allowed"),
    "batch": (["--model", "gpt2", "--batch", "0"], "--batch is 0; allowed"),
    "json": (["--model", "gpt2", "--json", "/no/f"], "--json: cannot write /no/f"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused_in_one_line(arguments, message, refused):
    refused("plan", *arguments, message=message)
