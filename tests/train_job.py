"""A tiny supervised run in a process of its own, for tests that kill it or start two of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from stretto.data.rows import Annotated, prompt_id


def annotated_rows(count: int = 12) -> list[dict[str, Any]]:
    """Rows with two promises each, prompts in them."""
    rows = []
    for k in range(count):
        prompt = f"question {k}"
        body = f"first part {'of it ' * (k % 4)}"
        text = (
            f'Intro {k} <promise topic="one" tokens="20"/><async>{body}</async> and '
            f'<promise topic="two" tokens="10"/><async>second</async><sync/> done'
        )
        response = f"Intro {k} {body} and second done"
        row = Annotated(
            prompt_id=prompt_id(prompt), prompt=prompt, response=response, annotated=text,
            annotator="test",
        )  # fmt: skip
        rows.append(row.model_dump(exclude_none=True))
    return rows


def register_rows(count: int = 12) -> list[dict[str, Any]]:
    """Rows of six steps in three registers, prompts in them."""
    rows = []
    for k in range(count):
        prompt = f"question {k}"
        steps = [f"step {i} {'and on ' * ((k + i) % 3)}" for i in range(6)]
        row = Annotated(
            prompt_id=prompt_id(prompt), prompt=prompt, response="".join(steps),
            annotated="".join(f"<reg_{i % 3}>{step}" for i, step in enumerate(steps)),
            annotator="test",
        )  # fmt: skip
        rows.append(row.model_dump(exclude_none=True))
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def main(settings: str) -> None:
    from stretto.train.config import SftConfig
    from stretto.train.sft import train_sft

    train_sft(SftConfig(**json.loads(settings)))


if __name__ == "__main__":
    main(sys.argv[1])
