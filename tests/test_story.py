"""docs/training.md, "From prompts to plot": one set of paths, and it goes through."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from test_docs import STRETTO, words_of
from tiny_lms import tiny_lm

from stretto.cli import main

READS = ("--prompts", "--data", "--model", "--answers", "--baseline", "--scored", "--pairs")
"""Options whose values are files or folders that must be there."""


def first_block(page: str, part: str) -> list[list[str]]:
    """The arguments of the commands of a page's first block that has `part` in a command."""
    block = next(b for b, c, _ in STRETTO if b.page.name == page and part in c)
    return [words_of(line) for line in block.text.splitlines()]


STORY = first_block("training.md", "eval plot")


def inputs(words: list[str]) -> Iterator[str]:
    """Paths that a command reads: of options, arms and judges, and its arguments."""
    for word, value in pairwise(words):
        if word in READS and not value.startswith("--"):
            yield value
        elif word == "--arm":
            yield value.partition("=")[2].partition(":")[0]
        elif word == "--judge" and ":" in value:
            yield value.partition(":")[2]
    options = [k for k, word in enumerate(words) if word.startswith("--")]
    yield from words[2 : options[0]]


def test_every_file_is_made_by_a_command_above() -> None:
    made = {"prompts.jsonl"}
    for words in STORY:
        for path in inputs(words):
            assert any(path == m or path.startswith(m + "/") for m in made), (words, path)
        if "--out" in words:
            out = words[words.index("--out") + 1]
            assert out not in made
            made.add(out)
    assert "plots" in made


@pytest.mark.parametrize(
    ("page", "part"),
    [("data.md", "data annotate"), ("preference.md", "train pairs"), ("evaluation.md", "eval plot"),
     ("training.md", "train sft")],
)  # fmt: skip
def test_the_pages_have_its_commands(page: str, part: str) -> None:
    """But for those that make nothing, as `data check`."""
    for words in first_block(page, part):
        assert words in STORY or "--out" not in words, words


# -- with a tiny model -----------------------------------------------------------------------------

SMALL = ["--dtype", "float32"]
LATER = {
    ("data", "sample"): ["--engine", "hf", "--max-tokens", "40", "--pool-slots", "4096", *SMALL],
    ("data", "annotate"): ["--tokenizer", "base", "--keep-unfinished"],
    ("train", "sft"): ["--max-steps", "2", *SMALL],
    ("train", "score"): SMALL,
    ("train", "prefer"): ["--max-steps", "1", *SMALL],
    ("eval", "run"): ["--engine", "hf", "--max-tokens", "20", *SMALL],
}
"""Options put after a command's own, the last of which counts. None names a file of the story."""

EVALUATED = (8, 46, 55, 60)
"""Of the prompts "say N", those in `--split 90-100`."""


def small(words: list[str]) -> list[str]:
    """A command for a tiny model in the folder `base`, which stands for the default one."""
    own = ["likelihood:base" if words[0] == "eval" and w == "likelihood" else w for w in words]
    if "--n" in own:
        own += ["--n", "3"]
    if own[1] in ("sample", "annotate", "sft") and "--model" not in own:
        own += ["--model", "base"]
    return own + LATER.get((words[0], words[1]), [])


def test_it_goes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_lm("plain").save(tmp_path / "base")
    numbers = (1, 2, 3, 4, 5, 6, *EVALUATED)
    lines = [json.dumps({"prompt": f"say {number}"}) for number in numbers]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for words in STORY:
            assert main(small(words)) == 0, words
    finally:
        torch.set_num_threads(num_threads)
    assert (tmp_path / "plots" / "realized.png").is_file()
