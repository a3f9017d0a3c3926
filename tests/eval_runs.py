"""Folders of finished runs of `stretto eval run`, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stretto.data.rows import prompt_id

PROMPTS = ("one", "two", "three")


def config(**changes: Any) -> dict[str, Any]:
    """Settings as runs had them before there were samples, pages and sizes."""
    side = {"model": "a", "method": "sequential", "fingerprint": None, "dialect": "plain",
            "scored_by": []}  # fmt: skip
    return {
        "task": {
            "name": "instruct", "version": 1, "has_scores": False, "num_prompts": len(PROMPTS),
            "left_out": {}, "digest": "d", "prompt_field": None, "reference_field": None,
            "limit": None, "split": "", "skip_if": [],
        },
        "ours": side | {"without": [], "joins": True},
        "baseline": side,
        "sampling": {"max_tokens": 8, "temperature": 0.0, "seed": 0},
        "place": {"engine": "hf", "dtype": "float32", "device": "cpu", "torch_threads": 1},
        "pairs": 0,
        "warm": "first",
        "keeps_prompts": True,
        **changes,
    }  # fmt: skip


def answer(text: str) -> dict[str, Any]:
    counts = ("prompt_tokens", "completion_tokens", "control_tokens", "drawn_tokens",
              "sequential_steps", "most_at_once", "redundant", "unjoined")  # fmt: skip
    thread = {"id": "main", "num_tokens": 3, "finish_reason": "stop"}
    return {"text": text, "finish_reason": "stop", "threads": [thread], **dict.fromkeys(counts, 3)}


def row(number: int, text: str) -> dict[str, Any]:
    return {
        "prompt_id": prompt_id(text), "number": number, "prompt": text,
        "ours": answer(f"ours of {text}"), "baseline": answer(f"theirs of {text}"),
    }  # fmt: skip


ENVIRONMENT = [{"machine": {"revision": "r"}}]


def write(out: Path, **files: Any) -> Path:
    """A finished run's folder, with other contents of some files."""
    out.mkdir(parents=True, exist_ok=True)
    rows = files.get("rows", [row(k, text) for k, text in enumerate(PROMPTS, 1)])
    (out / "config.json").write_text(json.dumps(files.get("config", config())))
    (out / "environment.json").write_text(json.dumps(files.get("environment", ENVIRONMENT)))
    (out / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for name, lines in files.get("verdicts", {}).items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (out / f"verdicts.{name}.jsonl").write_text(text)
    return out
