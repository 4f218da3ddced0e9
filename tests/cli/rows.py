"""Records of `ringdp train` with fixed numbers."""

from dataclasses import replace

from ringdp.cli.runs import Record

MEMORY = {
    "parameters": 4_130_304,
    "gathered_peak": 12_390_912,
    "gradients": 4_130_304,
    "buckets": 104_857_600,
    "optimizer": 8_260_608,
}
STAGE_0 = Record(
    stage=0,
    ranks=2,
    parameters=1_032_576,
    loss=(5.5, 4.0, 2.5),
    seconds=(0.2, 0.1, 0.1),
    tokens_per_step=1024,
    digest="d",
    sample=b"def f():\n\treturn '\xff'",
    memory=MEMORY,
    memory_formula=dict(MEMORY),
    sent=12_390_912,
    sent_formula=12_390_912,
)
STAGES = [replace(STAGE_0, stage=stage) for stage in range(4)]
REFERENCE = replace(STAGE_0, stage=None, ranks=1, loss=(5.5, 4.000001, 2.5))
