"""Updates docs/map.md: all files in reading order, each with the first sentence of its docstring.

    python -m bench.map

Order, headings and prose are kept as they are in the page. Each line that links to a file gets the
file's current sentence. Lines of deleted files are removed; new files are added after their
neighbours.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "map.md"
LINE = re.compile(r"(- |\d\. )\[`.*?`\]\(\.\./(.*?)\)")
SOURCES = ("ringdp/**/*.py", "kernels/*.py", "csrc/**/*.hpp", "csrc/**/*.cpp", "csrc/**/*.cu")


def files() -> list[str]:
    found = [path for pattern in SOURCES for path in ROOT.glob(pattern)]
    return sorted(str(p.relative_to(ROOT)) for p in found if p.name != "__init__.py")


def sentence(path: str) -> str:
    """The first sentence of the file's docstring, or of its first comment."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        said = re.match(r"(?://.*\n)*", text)[0].replace("//", "")
    paragraph = " ".join(said.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s(?=[A-Z])|:$", paragraph)[0]


def render(text: str) -> str:
    lines = [line for line in map(_current, text.splitlines()) if line is not None]
    for path in sorted(set(files()) - set(map(_path, lines))):
        folder = Path(path).parent
        beside = [
            i for i, line in enumerate(lines) if (p := _path(line)) and Path(p).parent == folder
        ]
        assert beside, f"docs/map.md needs a first line by hand: - [`x`](../{path})"
        lines.insert(beside[-1] + 1, _line("- ", path))
    return "\n".join(lines) + "\n"


def _current(line: str) -> str | None:
    match = LINE.match(line)
    if not match:
        return line
    return _line(match[1], match[2]) if (ROOT / match[2]).is_file() else None


def _line(begins: str, path: str) -> str:
    return f"{begins}[`{Path(path).name}`](../{path}): {sentence(path)}"


def _path(line: str) -> str | None:
    """The file of a line in a room's list; not of the numbered lines, which are reading paths."""
    match = LINE.match(line)
    return match[2] if match and match[1] == "- " else None


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
