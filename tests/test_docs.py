"""Every block of docs/ runs, and prints what the chapter says it prints."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from bench import docs

CHAPTERS = docs.chapters()


def on_rank(_comm: object, path: Path) -> str:
    return docs.script(path)


@pytest.mark.process
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_blocks_print_what_is_shown(chapter, ranks):
    text = chapter.read_text()
    pools = {2: ranks(2)}  # not started from the chapter's directory, which goes
    shown = docs.render(text, lambda n, path: pools[n](on_rank, path)[0])
    assert shown == text, "run: python -m bench.docs"


def test_a_block_is_compiled_as_a_readers_file_would_be():
    block = "```python\ndef f(n: int): ...\nprint(f.__annotations__)\n```\n"
    assert "{'n': <class 'int'>}" in docs.render(block, docs.jobs.run)


def test_there_are_five_and_each_leads_to_the_next():
    assert len(CHAPTERS) == 5
    for number, chapter in enumerate(CHAPTERS, 1):
        assert chapter.name.startswith(f"{number}-")
    for before, after in pairwise(CHAPTERS):
        assert f"({after.name})" in before.read_text()


def test_every_number_of_the_prose_is_printed_by_a_block():
    """A figure of two digits or more, or with a decimal point, stands in an output or in code."""
    for chapter in CHAPTERS:
        text = chapter.read_text()
        blocks = "".join(re.findall(r"```.*?```", text, re.DOTALL))
        prose = re.sub(r"```.*?```|`[^`]*`|\(\S+\.md\)", "", text, flags=re.DOTALL)
        for number in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])", prose):
            if len(number) > 1 and not re.fullmatch(r"(19|20)\d\d", number):  # years of sources
                assert number in blocks, f"{chapter.name}: {number}"
