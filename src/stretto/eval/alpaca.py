"""Answers in the form that AlpacaEval's own command reads, so that it can judge them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.errors import InvalidInput
from stretto.eval.folder import Run
from stretto.eval.rows import Side


def outputs(
    run: Run, side: Side, texts: Mapping[str, str], *, dataset: str, generator: str
) -> list[dict[str, Any]]:
    """Entries with `instruction`, `output`, `generator` and `dataset`, in the run's order: one for
    every prompt, since a missing one would be another benchmark. A prompt that failed has output
    "". `texts`: every prompt's by its id. Raises `InvalidInput` for a run without that side."""
    run.check_single("exported")
    if side == "baseline" and not run.has_baseline:
        raise InvalidInput(f"{run.path} has no baseline; export --side ours")
    entries = []
    for row in run.rows:
        answer = row.ours if side == "ours" else row.baseline
        entries.append(
            {
                "instruction": texts[row.prompt_id],
                "output": "" if answer is None else answer.text,
                "generator": generator,
                "dataset": dataset,
            }
        )
    return entries
