"""The code blocks of docs/ run and print what the chapters show; docs/map.md is current."""

from __future__ import annotations

import codeop
import re
from itertools import pairwise
from pathlib import Path

import pytest

from bench import docs
from bench import map as code_map

CHAPTERS = docs.chapters()


def on_rank(_comm: object, path: Path) -> str:
    return docs.script(path)


@pytest.mark.process
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_code_blocks_print_the_output_shown(chapter, ranks):
    text = chapter.read_text(encoding="utf-8")
    # started before the chapter's directory is current, which is deleted afterwards
    pools = {2: ranks(2)}
    shown = docs.render(text, lambda n, path: pools[n](on_rank, path)[0])
    assert shown == text, "run: python -m bench.docs"


def test_blocks_do_not_inherit_future_imports():
    block = "```python\ndef f(n: int): ...\nprint(f.__annotations__)\n```\n"
    assert "{'n': <class 'int'>}" in docs.render(block, docs.jobs.run)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_blocks_can_be_typed_at_the_prompt(chapter):
    """At the interactive prompt a blank line ends an indented block, and only a blank line does."""
    for block in re.findall(r"```python\n(.*?)```", chapter.read_text(encoding="utf-8"), re.DOTALL):
        if re.match(r"# \S+\.py\n", block):
            continue
        typed: list[str] = []
        for line in [*block.splitlines(), ""]:
            typed.append(line)
            # raises SyntaxError if it cannot be typed
            if codeop.compile_command("\n".join(typed), symbol="single"):
                typed = []
        assert not typed


def test_the_five_chapters_link_to_the_next():
    assert len(CHAPTERS) == 5
    for number, chapter in enumerate(CHAPTERS, 1):
        assert chapter.name.startswith(f"{number}-")
    for before, after in pairwise(CHAPTERS):
        assert f"({after.name})" in before.read_text(encoding="utf-8")


def test_every_number_in_the_prose_is_printed_by_a_block():
    """A number of two digits or more, or with a decimal point, appears in an output or in code."""
    for chapter in CHAPTERS:
        text = chapter.read_text(encoding="utf-8")
        blocks = "".join(re.findall(r"```.*?```", text, re.DOTALL))
        prose = re.sub(r"```.*?```|`[^`]*`|\(\S+\.md\)", "", text, flags=re.DOTALL)
        for number in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])", prose):
            # years of publications
            if len(number) > 1 and not re.fullmatch(r"(19|20)\d\d", number):
                assert number in blocks, f"{chapter.name}: {number}"


def test_the_map_lists_every_file_with_its_first_sentence():
    text = code_map.PAGE.read_text(encoding="utf-8")
    assert code_map.render(text) == text, "run: python -m bench.map"
    for path in code_map.files():
        assert len(re.findall(rf"(?m)^- \[`.+?`\]\(\.\./{re.escape(path)}\): .", text)) == 1, path


def test_the_map_follows_added_removed_and_changed_files():
    text = code_map.PAGE.read_text(encoding="utf-8")
    line = "- [`ir.py`](../ringdp/schedule/ir.py): A collective algorithm as data"
    assert line in text
    removed = "- [`gone.py`](../ringdp/schedule/gone.py): What is gone.\n"
    old = text.replace(line, f"{removed}- [`ir.py`](../ringdp/schedule/ir.py): What it once said")
    assert code_map.render(old) == text
    without = "".join(line for line in text.splitlines(True) if "- [`draw.py`]" not in line)
    assert "../ringdp/schedule/draw.py" not in without
    assert "- [`draw.py`](../ringdp/schedule/draw.py): Drawings" in code_map.render(without)
