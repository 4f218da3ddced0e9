"""The files of results, and the command-line options that write them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer import BadParameter

from ringdp.cli.bench import machine
from ringdp.cli.checks import check_writable, file_named
from ringdp.cli.files import write_json
from ringdp.errors import UsageError

RESULTS = Path(__file__).parent / "results"
OTHER = RESULTS / "other"  # another machine's


def parser(doc: str, rounds: int | None = None) -> argparse.ArgumentParser:
    """A bench's parser, with `--json`, and `--rounds` if a default is given."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--json", type=writable)
    if rounds is not None:
        made.add_argument("--rounds", type=positive, default=rounds)
    return made


def record(
    made: argparse.ArgumentParser, measure: Callable[..., dict[str, object]], cores: int = 2
) -> None:
    """Call `measure` with the options given, and write what it returns, with the machine and its
    load before and after. `cores`: how many ranks are pinned to."""
    asked = vars(made.parse_args())
    path, here = asked.pop("json"), machine.describe(cores)
    found = measure(**asked)
    write_json(path, {"machine": here | {"load after": machine.load()}} | found)


def writable(given: str) -> Path:
    """Check that a file can be written, before anything is measured."""
    try:
        check_writable(path := file_named(given))
    except (UsageError, BadParameter) as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--json: ")) from None
    return path


def positive(given: str) -> int:
    if not given.isdecimal() or not int(given):
        raise argparse.ArgumentTypeError(f"{given!r} is no whole number above 0")
    return int(given)


def load(name: str) -> Any:
    """The contents of results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_bytes())
