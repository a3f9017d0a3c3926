"""The documentation does what it says: snippets run, commands parse, shown output is right."""

from __future__ import annotations

import copy
import io
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import tiny_model
from tiny_lms import tiny_lm, tiny_tokenizer

from stretto import LM, cli

ROOT = Path(__file__).parents[1]
LOAD = LM.load
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"(<!-- embedded -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SHOWN = ("trace show",)
"""Commands whose output is the same everywhere, so that what the docs show is compared."""

ELLIPSIS = "…"
"""As the last line of an output: more follows that is not shown."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    is_embedded: bool


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    source = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(source):
        marked, language, text = found.groups()
        if language in languages:
            line = source.count("\n", 0, found.start(3))
            yield Block(page, line, language, text, marked is not None)


def run_python(page: Path, *, embedded: bool) -> int:
    """Runs a page's blocks in order in one namespace; `model`, `tokenizer`, `lm` are tiny ones."""
    tokenizer = tiny_tokenizer()
    namespace: dict[str, Any] = {"__name__": "docs"}
    if not embedded:
        model = copy.deepcopy(tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=None))
        namespace |= {"model": model, "tokenizer": tokenizer, "lm": tiny_lm()}
    count = 0
    for block in blocks(page, "python"):
        if block.is_embedded == embedded:
            source = "\n" * block.line + block.text
            exec(compile(source, str(page), "exec", dont_inherit=True), namespace)
            count += 1
    return count


def pages_with(language: str, *, embedded: bool) -> list[Path]:
    return [p for p in PAGES if any(b.is_embedded == embedded for b in blocks(p, language))]


@pytest.mark.parametrize("page", pages_with("python", embedded=False), ids=lambda p: p.name)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert run_python(page, embedded=False)


@cache
def embedded_lm() -> LM:
    """One for all pages: loading it again each time would show nothing new."""
    return LOAD()


@pytest.mark.embedded
@pytest.mark.parametrize("page", pages_with("python", embedded=True), ids=lambda p: p.name)
def test_python_blocks_of_the_embedded_model_run(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(LM, "load", staticmethod(embedded_lm))
    assert run_python(page, embedded=True)


# -- commands --------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[Block, str, str]]:
    """(block, command, what the docs show it prints) of every `sh` and `console` block."""
    for page in PAGES:
        for block in blocks(page, "sh", "console"):
            if block.language == "sh":
                whole = block.text.replace("\\\n", " ")
                lines = [line for line in whole.splitlines() if line.strip()]
                yield from ((block, line, "") for line in lines)
                continue
            for entry in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, output = entry.partition("\n")
                yield block, command, output


ALL = list(commands())
STRETTO = [(b, c, o) for b, c, o in ALL if "stretto " in c and not c.startswith("git ")]


def words_of(command: str) -> list[str]:
    """The arguments of the `stretto` in a command line, without pipes and redirections."""
    words = shlex.split(command, comments=True)
    words = words[words.index("stretto") + 1 :]
    ends = [i for i, word in enumerate(words) if word in ("|", ">", "<", ">>", "2>", "&&")]
    return words[: min(ends, default=len(words))]


@pytest.mark.parametrize(
    "command", sorted({c for _, c, _ in STRETTO}), ids=lambda c: c[:60].replace("/", "|")
)
def test_commands_parse(command: str) -> None:
    node: Any = typer.main.get_command(cli.app)
    args = words_of(command)
    context = node.make_context("stretto", list(args)) if args != ["--help"] else None
    while context is not None and hasattr(node, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, node, args = node.resolve_command(context, rest)
        if args == ["--help"]:
            return
        context = node.make_context(name, args, parent=context)


def shown() -> list[tuple[str, str]]:
    return [(c, o) for _, c, o in STRETTO if o and any(s in c for s in SHOWN)]


@pytest.mark.parametrize(("command", "output"), shown(), ids=lambda t: t[:60].replace("/", "|"))
def test_shown_output_is_what_is_printed(
    command: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    code = typer.main.get_command(cli.app).main(words_of(command), standalone_mode=False)
    assert not code
    buffer = out.buffer
    assert isinstance(buffer, io.BytesIO)
    printed = buffer.getvalue().decode()
    lines = [line.rstrip() for line in printed.splitlines()]
    expected = output.rstrip("\n").splitlines()
    if expected[-1] == ELLIPSIS:
        expected = expected[:-1]
        lines = lines[: len(expected)]
    assert lines == expected


def test_every_other_command_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block, command, _ in ALL:
        if "stretto " in command:
            continue
        words = shlex.split(command, comments=True)
        where = f"{block.page.name}:{block.line}: {command}"
        match words:
            case ["make", *names]:
                assert {name for name in names if "=" not in name} <= targets, where
            case ["python", script, *_] if script != "-m":
                assert (ROOT / script).is_file(), where
            case ["git" | "cd" | "pip", *_]:
                pass
            case [] | ["python", "-m", *_]:
                pass
            case _:
                pytest.fail(f"a command that no test knows: {where}")


def test_the_readme_sets_up_by_make_demo_and_make_test() -> None:
    setup = [c for b, c, _ in ALL if b.page.name == "README.md"]
    assert "make demo" in setup
    assert "make test" in setup
    assert any(c.startswith("git clone ") for c in setup)


# -- links and completeness ------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_resolve(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def verbs(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if not hasattr(node, "commands"):
        yield " ".join(path), node
        return
    for name, child in node.commands.items():
        yield from verbs(child, (*path, name))


VERBS = dict(verbs(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("verb", VERBS)
def test_the_reference_has_every_verb_and_option(verb: str) -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    _, _, rest = page.partition(f"## stretto {verb}\n")
    section = re.split(r"^## ", rest, flags=re.MULTILINE)[0]
    assert section, f"docs/cli.md has no section on `stretto {verb}`"
    for parameter in VERBS[verb].params:
        for option in parameter.opts:
            if option.startswith("--") and option != "--help":
                assert f"`{option}" in section, f"docs/cli.md, {verb}: {option}"


def test_the_docs_speak_of_the_project_alone() -> None:
    ours = (
        r"dev/|v1/|llm/|etc/(?:systemd|prometheus)/|etc/stretto\.|opt/stretto/|var/cache/stretto\b"
    )
    absolute = rf"(?<![\w.~:/<-])/(?!{ours})\w+/|/root/"
    unwanted = re.compile(rf"{absolute}|\bhelpers?\b|\bissues show\b|shared/", re.IGNORECASE)
    for page in PAGES:
        assert unwanted.findall(page.read_text(encoding="utf-8")) == [], page.name


def test_pages_are_linked_from_the_readme() -> None:
    linked = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    for page in (ROOT / "docs").glob("*.md"):
        assert any(target.startswith(f"docs/{page.name}") for target in linked), page.name
