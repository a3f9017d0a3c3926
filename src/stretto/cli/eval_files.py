"""`stretto eval export` and `examples`: files for other programs, and training data of a task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import data_options
from stretto.cli import eval_parts as parts

if TYPE_CHECKING:
    from stretto.eval.rows import Side

FORMATS = ("alpaca_eval",)
FORMS = ("annotated", "planned", "questions")
Out = Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")]


def eval_export(
    folder: parts.Folder,
    *,
    out: Out,
    output_format: Annotated[str, typer.Option("--format", help="alpaca_eval.")] = "alpaca_eval",
    prompts: parts.Prompts = None,
    side: Annotated[str, typer.Option(help="ours or baseline.")] = "ours",
    generator: Annotated[
        str | None, typer.Option(metavar="NAME", help="What to call the model.")
    ] = None,
    dataset: Annotated[
        str, typer.Option(metavar="NAME", help="What to call the prompts.")
    ] = "alpaca_eval",
    as_json: parts.AsJson = False,
) -> None:
    """Write a run's answers as another program's input: AlpacaEval's model outputs."""
    import json

    from stretto.cli.bench_parts import show
    from stretto.cli.output import check_writable, write_file
    from stretto.errors import UnknownName
    from stretto.eval.alpaca import outputs
    from stretto.eval.folder import unjudged_run
    from stretto.eval.texts import texts_of

    if output_format not in FORMATS:
        raise UnknownName("format", output_format, list(FORMATS))
    chosen = _side(side)
    check_writable(out, "--out")
    run = unjudged_run(folder)
    name = generator if generator is not None else _generator(run.config, run.name, chosen)
    texts = texts_of(run, prompts or ())
    entries = outputs(run, chosen, texts, dataset=dataset, generator=name)
    text = json.dumps(entries, ensure_ascii=False, indent=2) + "\n"
    write_file(out, text.encode("utf-8", "backslashreplace"))
    counts = {"file": str(out), "outputs": len(entries), "generator": name}
    counts["empty"] = sum(entry["output"] == "" for entry in entries)
    show(counts if as_json else None, f"{out}: {len(entries)} outputs of {name}")


def _side(name: str) -> Side:
    from stretto.errors import UnknownName

    if name == "ours":
        return "ours"
    if name == "baseline":
        return "baseline"
    raise UnknownName("side", name, ["ours", "baseline"])


def _generator(config: dict[str, Any], run: str, side: Side) -> str:
    """The run's name for our side, so that two methods of one model differ."""
    return run if side == "ours" else str(config["baseline"]["model"])


def eval_examples(
    *,
    num: Annotated[int, typer.Option(metavar="N", help="How many.")],
    out: Out,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "train",
    form: Annotated[
        str, typer.Option("--as", help="annotated or planned: to train on; questions: to ask.")
    ] = "annotated",
    parts_of_each: Annotated[
        str, typer.Option("--parts", metavar="N|LOW-HIGH", help="Small questions of a problem.")
    ] = "4-5",
    kinds: Annotated[
        str, typer.Option(metavar="K1,K2", help="Kinds of small questions. [default: all]")
    ] = "",
    tokenizer: data_options.Tokenizer = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the problems.")] = 0,
    as_json: parts.AsJson = False,
) -> None:
    """Write problems of task multipart with right answers: a part never in two splits."""
    from stretto.cli.bench_parts import check, show, words
    from stretto.cli.output import check_writable, write_file
    from stretto.data.store import line_of
    from stretto.errors import UnknownName
    from stretto.eval.multipart import (
        KINDS,
        SPLITS,
        multipart_questions,
        multipart_rows,
        parse_parts,
    )

    check(num=num)
    if form not in FORMS:
        raise UnknownName("form", form, list(FORMS))
    if split not in SPLITS:
        raise UnknownName("split", split, list(SPLITS))
    num_parts = parse_parts(parts_of_each)
    own = words("--kinds", kinds) if kinds else KINDS
    check_writable(out, "--out")
    if form == "questions":
        rows = multipart_questions(seed, num, split=split, parts=num_parts, kinds=own)
    else:
        count, planned = _counter(tokenizer), form == "planned"
        rows = multipart_rows(
            seed,
            num,
            split=split,
            parts=num_parts,
            kinds=own,
            count_tokens=count,
            planned=planned,
        )
    write_file(out, b"".join(line_of(row) for row in rows))
    result = {"file": str(out), "examples": len(rows), "split": split}
    show(result if as_json else None, f"{out}: {len(rows)} examples of split {split}")


def _counter(tokenizer: str | None) -> Callable[[str], int]:
    """Counts tokens as the model named does; the embedded one's unless one is named."""
    from stretto.data.check import load_checker

    return load_checker(tokenizer).count
