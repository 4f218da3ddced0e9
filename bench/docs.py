"""Runs the code in docs/ and writes each block's output below it.

    python -m bench.docs

A chapter's blocks run in order, in a temporary directory:

    ```python          in one namespace per chapter; or, after `# NAME.py`, saved as that file
    ```sh              `ringdp ...`, or `torchrun --nproc-per-node N NAME.py`
    ```text            the exact output of the block above; with several ranks, rank 0's
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench import jobs
from ringdp.cli.main import main as ringdp

ROOT = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"```(python|sh)\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
TORCHRUN = re.compile(r"torchrun --nproc-per-node (\d+) (\S+\.py)")

Launch = Callable[[int, Path], str]  # (ranks, file) -> what rank 0 prints


def chapters() -> list[Path]:
    return sorted(ROOT.glob("[1-9]-*.md"))


def render(text: str, launch: Launch) -> str:
    """The chapter with current outputs. Raises what a block raises."""
    namespace: dict[str, object] = {"__name__": "chapter"}
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        return BLOCK.sub(lambda match: _shown(match, namespace, launch), text)


def _shown(match: re.Match[str], namespace: dict[str, object], launch: Launch) -> str:
    kind, code = match[1], match[2]
    named = re.match(r"# (\S+\.py)\n", code)
    if kind == "sh":
        said = "".join(_command(line, launch) for line in code.splitlines())
    elif named:
        Path(named[1]).write_text(code, encoding="utf-8")
        said = ""
    else:
        block = compile(code, "<block>", "exec", dont_inherit=True)
        said = printed(lambda: exec(block, namespace))
    shown = f"```{kind}\n{code}```\n"
    return shown + (f"\n```text\n{said}```\n" if said else "")


def _command(line: str, launch: Launch) -> str:
    if run := TORCHRUN.fullmatch(line):
        return launch(int(run[1]), Path(run[2]).absolute())
    words = line.split()
    assert words[0] == "ringdp", line

    def act() -> None:
        assert ringdp(words[1:]) == 0, line

    return printed(act)


def printed(act: Callable[[], object]) -> str:
    """What `act` prints, without trailing blanks, which editors remove."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        act()
    return "".join(f"{line.rstrip()}\n" for line in said.getvalue().splitlines())


def script(path: Path) -> str:
    """On a rank: run the file as a program in its directory; return what it prints."""
    with contextlib.chdir(path.parent):
        return printed(lambda: runpy.run_path(str(path), run_name="__main__"))


if __name__ == "__main__":
    for chapter in chapters():
        text = chapter.read_text(encoding="utf-8")
        shown = render(text, lambda n, path: jobs.run(n, script, path))
        chapter.write_text(shown, encoding="utf-8")
