"""What `stretto data annotate` was asked for, and the annotator that comes of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli import data_options

if TYPE_CHECKING:
    from stretto.data.annotators import Annotator
    from stretto.data.check import Checker

RAW = "raw.jsonl"
"""A teacher's replies, in the folder that rows are appended in."""


@dataclass(frozen=True)
class Job:
    """What `annotate` was asked for, besides files."""

    annotator: str
    model: str | None
    base_url: str | None
    key_env: str
    temperature: float
    max_tokens: int
    concurrency: int
    timeout: float
    attempts: int
    price_in: float | None
    price_out: float | None
    cap: float | None
    unit: int
    tokenizer: str | None
    settings: tuple[str, ...]

    @property
    def dialect(self) -> str:
        return "apar" if self.annotator == "apar" else "pasta"

    def check(self) -> None:
        """Raises for what cannot work, before anything is read."""
        from stretto.data.annotators import ANNOTATORS
        from stretto.errors import InvalidInput, UnknownName

        if self.annotator not in ANNOTATORS:
            raise UnknownName("annotator", self.annotator, list(ANNOTATORS))
        if self.annotator == "teacher" and self.model is None:
            raise InvalidInput("annotator teacher needs --model, the name the endpoint knows")
        self._check_used()
        data_options.check(
            concurrency=self.concurrency, max_tokens=self.max_tokens, attempts=self.attempts
        )
        if self.cap is not None and not self.cap > 0:
            raise InvalidInput(f"--cap must be above 0, got {self.cap:g}")
        if not math.isfinite(self.temperature):
            raise InvalidInput(f"--temperature must be a number, got {self.temperature}")
        self.own_settings()

    def _check_used(self) -> None:
        """Raises for an option that another annotator has: it would be passed over in silence."""
        from stretto.errors import InvalidInput

        of_teacher = ("base_url", "price_in", "price_out", "cap")
        others = {"teacher": (), "likelihood": of_teacher}
        for name in others.get(self.annotator, ("model", *of_teacher)):
            if getattr(self, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise InvalidInput(f"annotator {self.annotator} has no {option}; leave it out")

    def own_settings(self) -> dict[str, Any]:
        """Those of --set: JSON values, or texts where they are none."""
        from stretto.errors import InvalidInput

        own: dict[str, Any] = {}
        for entry in self.settings:
            name, equals, value = entry.partition("=")
            if not equals or not name.isidentifier():
                raise InvalidInput(f"--set {entry!r} is no NAME=VALUE")
            try:
                own[name] = json.loads(value)
            except ValueError:
                own[name] = value
        return own

    def identity(self) -> dict[str, Any]:
        """What all rows of a folder must share."""
        common: dict[str, Any] = {"annotator": self.annotator, "model": self.model}
        common |= {"unit": self.unit, "tokenizer": self.tokenizer}
        if self.annotator == "teacher":
            common |= {"base_url": self.base_url, "temperature": self.temperature}
        return common | {"set": self.own_settings()}


def make(job: Job, checker: Checker, folder: Path) -> Annotator:
    """The annotator with its settings. Raises `InvalidInput` for a setting it does not have."""
    from stretto.data.annotators import checked_settings, get_annotator

    ways: Mapping[str, Callable[[], dict[str, Any]]] = {
        "teacher": lambda: _teacher_settings(job, checker, folder),
        "structure": lambda: {"count": checker.count, "unit": job.unit},
        "likelihood": lambda: {"model_name": job.model, "unit": job.unit},
        "apar": dict,
    }
    given = ways[job.annotator]()
    own = checked_settings(job.annotator, job.own_settings(), given)
    return get_annotator(job.annotator, given | own)


def _teacher_settings(job: Job, checker: Checker, folder: Path) -> dict[str, Any]:
    from stretto.data.client import Endpoint

    endpoint = Endpoint(
        model=job.model or "",
        url=job.base_url,
        api_key_env=job.key_env,
        timeout_s=job.timeout,
        max_attempts=job.attempts,
        max_tokens=job.max_tokens,
        price_in=job.price_in,
        price_out=job.price_out,
        max_cost=job.cap,
    )
    return {
        "endpoint": endpoint,
        "checker": checker,
        "raw": folder / RAW,
        "temperature": None if job.temperature < 0 else job.temperature,
        "concurrency": job.concurrency,
        "client": None,
    }
