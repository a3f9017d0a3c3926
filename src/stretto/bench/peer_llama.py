"""llama.cpp as a side, by the low-level functions of `llama-cpp-python`: tokens in, tokens out.

Sequences share their prefix: `llama_memory_seq_cp` in a unified cache copies no keys or values.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.bench.sides import Decoded, Task
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BATCH = 512
CELLS = 256
"""llama.cpp rounds contexts up to a multiple of this."""


class LlamaSide:
    """A GGUF file in llama.cpp on `num_threads` CPU threads."""

    def __init__(self, path: Path, precision: str, num_threads: int) -> None:
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
        self.name = f"llama.cpp {precision}"
        self.num_threads = num_threads
        self._c: Any = llama_cpp
        self._context: Any = None
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise StrettoError(f"llama.cpp cannot load {path}; remove that file and try again")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH, 0, 1)

    def open(self, task: Task) -> None:
        self._task, self._next = task, 0
        self._make_context(task.num_slots, task.num_rows + 1)
        self._feed_prompt(task.prompt)

    def run(self) -> Decoded:
        task, memory = self._task, self._memory
        starts, at = task.bursts[self._next], len(task.prompt)
        self._next += 1
        for row in range(1, task.num_rows + 1):
            self._c.llama_memory_seq_rm(memory, row, -1, -1)
        rows = range(1, len(starts) + 1)
        for row in rows:
            self._c.llama_memory_seq_cp(memory, 0, row, -1, -1)
        logits = self._decode(starts, [at] * len(starts), rows)
        first = logits.copy()
        drawn = [logits.argmax(axis=1)]
        start = time.perf_counter()
        for step in range(1, task.num_steps + 1):
            logits = self._decode(drawn[-1].tolist(), [at + step] * len(starts), rows)
            drawn.append(logits.argmax(axis=1))
        seconds = time.perf_counter() - start
        return Decoded(seconds, np.stack(drawn, axis=1).tolist(), first)

    def sequential(self, prompt: list[int], num_tokens: int) -> float:
        """Seconds of reading a prompt and writing `num_tokens` tokens, greedily, one after the
        other. The context is made before, and let go of after; so that none of its memory is new
        to the system while it is timed, a token is decoded and all cells are cleared first."""
        self._make_context(len(prompt) + num_tokens, 1)
        self._decode(prompt[:1], [0], [0])
        self._c.llama_memory_clear(self._memory, True)
        start = time.perf_counter()
        token = int(self._feed_prompt(prompt)[0].argmax())
        for position in range(len(prompt), len(prompt) + num_tokens - 1):
            token = int(self._decode([token], [position], [0])[0].argmax())
        seconds = time.perf_counter() - start
        self.close()
        return seconds

    def close(self) -> None:
        if self._context is not None:
            self._c.llama_free(self._context)
            self._context = None

    def free(self) -> None:
        """Lets go of the model; the side is of no use after."""
        self.close()
        if self._model is not None:
            self._c.llama_batch_free(self._batch)
            self._c.llama_model_free(self._model)
            self._model = None

    def _make_context(self, num_cells: int, num_sequences: int) -> None:
        self.close()
        params = self._c.llama_context_default_params()
        params.n_ctx = -(-num_cells // CELLS) * CELLS
        params.n_batch = params.n_ubatch = MAX_BATCH
        params.n_seq_max = num_sequences
        params.n_outputs_max = params.n_outputs_max_per_seq = 0
        params.n_threads = params.n_threads_batch = self.num_threads
        params.kv_unified = True
        self._context = self._c.llama_init_from_model(self._model, params)
        if not self._context:
            raise StrettoError(
                f"llama.cpp cannot make a context of {num_cells} tokens; ask for fewer"
            )
        self._memory = self._c.llama_get_memory(self._context)

    def _feed_prompt(self, prompt: list[int]) -> NDArray[np.float32]:
        """Feeds sequence 0; the logits of its last token."""
        for at in range(0, len(prompt), MAX_BATCH):
            part = prompt[at : at + MAX_BATCH]
            places = list(range(at, at + len(part)))
            is_last = at + len(part) == len(prompt)
            logits = self._decode(part, places, [0] * len(part), last_only=True, reads=is_last)
        return logits

    def _decode(
        self, tokens: list[int], positions: list[int], sequences: Any, *,
        last_only: bool = False, reads: bool = True,
    ) -> NDArray[np.float32]:  # fmt: skip
        """One pass; logits as a view that the next pass overwrites."""
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for i, sequence in enumerate(sequences):
            batch.token[i] = tokens[i]
            batch.pos[i] = positions[i]
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = not last_only or i == count - 1
        if status := self._c.llama_decode(self._context, batch):
            raise StrettoError(f"llama.cpp failed to decode (status {status}); ask for less")
        num_logits = 1 if last_only else count
        shape = (num_logits if reads else 0, self._vocab_size)
        return np.ctypeslib.as_array(self._c.llama_get_logits(self._context), shape)


def system_info() -> str:
    """The CPU features that llama.cpp was built for, as it tells them."""
    import llama_cpp

    return str(llama_cpp.llama_print_system_info().decode()).strip(" |")
