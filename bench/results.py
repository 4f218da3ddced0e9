"""The files in which benches leave what they have measured."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def parser(doc: str, rounds: int | None = None) -> argparse.ArgumentParser:
    """Of a bench's arguments: `--json`, and `--rounds` where it has so many by default."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--json", type=Path)
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds)
    return made


def load(name: str) -> Any:
    """What a bench has left in results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def write(path: Path | None, found: object) -> None:
    """`found`: what JSON has, and dataclasses. Without a path, nothing is written."""
    if path:
        text = json.dumps(found, indent=1, ensure_ascii=False, default=asdict)
        path.write_text(f"{text}\n", encoding="utf-8")
