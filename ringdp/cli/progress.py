"""Progress of runs: a live table on a terminal, occasional plain lines elsewhere."""

import time
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from ringdp.cli.console import fits, say
from ringdp.cli.runs import MEMORY, Progress

PLAIN_EVERY = 5.0  # s
MIB = 1 << 20
BAR = 14  # characters
HEADINGS = ("params", "gather", "grads", "bucket", "optim")  # of MEMORY, at 80 columns


class Display:
    """Shows the latest progress of each run. `update` may be called from any thread."""

    def __init__(self, console: Console, *, memory: bool = True) -> None:
        self._console = console
        self._memory = memory
        self._latest: dict[str, Progress] = {}
        self._plain_due = 0.0
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self.table)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, progress: Progress) -> None:
        self._latest = {**self._latest, progress.run: progress}
        if self._console.is_terminal:
            return
        now = time.monotonic()
        if now >= self._plain_due or progress.step == progress.steps:
            self._plain_due = now + PLAIN_EVERY
            say(self._console, plain_line(progress))

    def table(self) -> Table:
        """One row per run, in the order in which they started. Bytes are rank 0's.

        A narrow terminal shows no memory; a narrower one shows no bar either.
        """
        for memory, bar in ((self._memory, True), (False, True), (False, False)):
            made = self._table(memory=memory, bar=bar)
            if fits(self._console, made):
                break
        return made

    def _table(self, *, memory: bool, bar: bool) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        table.add_column("run", min_width=7, no_wrap=True)
        if bar:
            table.add_column("", width=BAR)
        for heading in ("step", "loss", "tok/s", *(HEADINGS if memory else ())):
            table.add_column(heading, justify="right", no_wrap=True)
        for progress in self._latest.values():
            done = ProgressBar(total=progress.steps, completed=progress.step, width=BAR)
            table.add_row(
                progress.run,
                *([done] if bar else []),
                f"{progress.step}",
                f"{progress.loss:.3f}",
                f"{progress.tokens_per_second:,.0f}",
                *(_mib(progress.memory.get(key)) for key in MEMORY if memory),
            )
        table.caption = "memory per rank in MiB" if memory and self._latest else None
        table.caption_justify = "right"
        return table


def plain_line(progress: Progress) -> str:
    memory = "".join(
        f"  {name} {_mib(progress.memory[key])}"
        for name, key in zip(HEADINGS, MEMORY, strict=True)
        if key in progress.memory
    )
    return (
        f"{progress.run:7}  step {progress.step}/{progress.steps}  loss {progress.loss:.4f}  "
        f"{progress.tokens_per_second:,.0f} tokens/s{memory}{' MiB' if memory else ''}"
    )


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / MIB:.2f}"
