"""The runtimes that are compared with, and their sides over one source's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from stretto.bench.pairs import Report
from stretto.bench.sides import Side, Task, opened
from stretto.errors import InvalidInput, UnknownName

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stretto.bench.peer_llama import LlamaSide
    from stretto.bench.source import Source


@dataclass(frozen=True, slots=True)
class Kind:
    """A runtime that may be installed. `package`: what pip calls it; `has_side`: it is measured."""

    name: str
    module: str
    package: str
    has_side: bool = False

    @property
    def status(self) -> str:
        """`measured`, or why it is not and what to do."""
        if find_spec(self.module) is None:
            return f"not installed; pip install {self.package}"
        return "measured" if self.has_side else "installed, but there is no side for it"

    @property
    def version(self) -> str | None:
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    @property
    def built_for(self) -> str | None:
        """The CPU features that it was built for, where it tells them."""
        if self.name != "llama.cpp":
            return None
        from stretto.bench.peer_llama import system_info

        return system_info()


KINDS = (
    Kind("llama.cpp", "llama_cpp", "llama-cpp-python", has_side=True),
    Kind("transformers", "transformers", "transformers", has_side=True),
    Kind("vllm", "vllm", "vllm"),
    Kind("onnxruntime-genai", "onnxruntime_genai", "onnxruntime-genai"),
    Kind("openvino", "openvino_genai", "openvino-genai"),
)


def chosen_kinds(names: Sequence[str]) -> list[Kind]:
    """The kinds named; raises `UnknownName`, or `InvalidInput` for one that is not installed."""
    known = {kind.name: kind for kind in KINDS}
    for name in names:
        if name not in known:
            raise UnknownName("peer", name, list(known))
        if known[name].status != "measured":
            raise InvalidInput(f"peer {name!r} is {known[name].status}")
    return [known[name] for name in names]


def installed_kinds() -> list[Kind]:
    """All that can be measured here."""
    return [kind for kind in KINDS if kind.status == "measured"]


def statuses(chosen: Sequence[Kind]) -> list[dict[str, Any]]:
    """Name, status and version of every known kind; of those chosen, what they were built for."""
    found = []
    for kind in KINDS:
        is_left_out = kind.status == "measured" and kind not in chosen
        found.append(
            {
                "name": kind.name,
                "status": "left out" if is_left_out else kind.status,
                "version": kind.version,
                "built_for": kind.built_for if kind in chosen else None,
            }
        )
    return found


class Lineup:
    """The sides of all peers, made of one source's weights when first asked for, and kept."""

    def __init__(
        self, source: Source, kinds: Sequence[Kind], num_threads: int, report: Report
    ) -> None:
        self._source = source
        self._kinds = kinds
        self._num_threads = num_threads
        self._report = report
        self._models: dict[str, Any] = {}
        self._llama: dict[str, LlamaSide] = {}
        self._references: dict[tuple[int, tuple[int, ...]], NDArray[np.float32]] = {}
        names = {kind.name for kind in kinds}
        self.llama_precisions: Sequence[str] = ()
        if "llama.cpp" in names:
            from stretto.bench.gguf_file import PRECISIONS, check_writable

            check_writable(self.model("bfloat16").config)
            self.llama_precisions = PRECISIONS
        self._makers: dict[str, Callable[[], Side]] = {
            f"llama.cpp {precision}": partial(self.llama, precision)
            for precision in self.llama_precisions
        }
        if "transformers" in names:
            for dtype in ("bfloat16", "float32"):
                self._makers[f"transformers {dtype}"] = partial(self.transformers, dtype)

    @property
    def names(self) -> list[str]:
        return list(self._makers)

    def side(self, name: str) -> Side:
        return self._makers[name]()

    def model(self, dtype: str) -> Any:
        if dtype not in self._models:
            self._models[dtype] = self._source.hf_model(dtype)
        return self._models[dtype]

    def transformers(self, dtype: str) -> Side:
        from stretto.bench.peer_transformers import TransformersSide

        return TransformersSide(self.model(dtype))

    def llama(self, precision: str) -> LlamaSide:
        from stretto.bench.gguf_file import cached_gguf, weights_digest
        from stretto.bench.peer_llama import LlamaSide

        if precision not in self._llama:
            model = self.model("bfloat16")
            path = cached_gguf(model, precision, weights_digest(model), self._tell)
            self._llama[precision] = LlamaSide(path, precision, self._num_threads)
        return self._llama[precision]

    def _tell(self, task: str, done: int, total: int) -> None:
        if done == 0:
            self._report(task)

    def reference(self, task: Task) -> NDArray[np.float32]:
        """Logits of the task's first step in float32."""
        key = len(task.prompt), tuple(task.bursts[0])
        if key not in self._references:
            first = Task(task.prompt, task.bursts[:1], 0)
            with opened(self.transformers("float32"), first) as side:
                self._references[key] = side.run().first_logits
        return self._references[key]
