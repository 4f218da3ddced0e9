"""Parses the PTX of one kernel into lines for `ptx`."""

from __future__ import annotations

import re
from typing import NamedTuple


class Line(NamedTuple):
    predicate: str  # empty: executed by all threads
    negated: bool
    name: str
    parts: tuple[str, ...]  # the name's suffixes, split at dots
    operands: tuple[str, ...]
    text: str

    @property
    def type(self) -> str:
        return self.parts[-1]


class Code:
    """The lines and labels of one kernel, and its threads per block."""

    def __init__(self, ptx: str) -> None:
        ptx = re.sub(r"//.*|^\s*\.(?:loc|reg|pragma)\b.*", "", ptx, flags=re.MULTILINE)
        head, body = re.split(r"^\{", ptx[ptx.index(".entry") :], maxsplit=1, flags=re.MULTILINE)
        self.threads = int(re.findall(r"\.reqntid (\d+)", head)[0])
        self.lines, self.labels = list[Line](), dict[str, int]()
        for word in re.split(r";|(?<=:)\s", re.split(r"^\}", body, flags=re.MULTILINE)[0]):
            text = word.strip()
            if text.endswith(":"):
                self.labels[text[:-1]] = len(self.lines)
            elif text:
                self.lines.append(_line(text))


def _line(text: str) -> Line:
    found = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", text, re.DOTALL)
    assert found, text
    negated, predicate, name, rest = found.groups()
    name, *parts = name.replace("::", "_").split(".")
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{\[]+", rest)
    return Line(predicate or "", bool(negated), name, tuple(parts), tuple(operands), text)


def names(operand: str) -> list[str]:
    return re.findall(r"%?\w+", operand)
