"""One answer measured: decoded, timed, and read for what its threads did. Needs no task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stretto.data.sample import request_seed
from stretto.errors import StrettoError
from stretto.eval.rows import Answered, LiveRow, ThreadRow
from stretto.methods import is_for_any_model
from stretto.recorder import MAIN
from stretto.trace import is_drawn, live_tokens
from stretto.train.scores import redundant_branches

if TYPE_CHECKING:
    from stretto.completion import Completion
    from stretto.lm import LM
    from stretto.params import SamplingParams
    from stretto.stream import Stream
    from stretto.trace import Trace

HARMLESS = ("clamped-tokens",)
"""Issues of a well-formed answer: the model's positions ran short, its annotations are right."""


class Interrupted(Exception):
    """Ctrl-C came between two steps; the answer under way is given up."""


@dataclass(frozen=True)
class Contestant:
    """A model and the method by which it answers."""

    lm: LM
    method: str

    @property
    def page_size(self) -> int:
        return self.lm.scheduler.pool.page_size

    def submit(self, prompt: str, params: SamplingParams, sample: int = 0) -> Stream:
        """Queues sample number `sample` of a prompt; no two prompts draw the same numbers. Raises
        `InvalidInput` for one that cannot be answered."""
        own = replace(params, seed=request_seed(params.seed, prompt))
        return self.lm.submit(prompt, own, method=self.method, sample=sample)

    def answer(
        self,
        prompt: str,
        params: SamplingParams,
        is_interrupted: Callable[[], bool],
        sample: int = 0,
    ) -> Completion:
        """Decodes a prompt alone, to its end.

        Raises `StrettoError` for a prompt that cannot be answered (memory that ran out included),
        `Interrupted` after Ctrl-C. The clock of a step stops when its logits are on the CPU, so a
        GPU has finished what is timed; what it still had to do before is waited for first.
        """
        import torch

        if str(getattr(self.lm.engine, "device", "cpu")).startswith("cuda"):
            torch.cuda.synchronize()
        try:
            with self.submit(prompt, params, sample) as stream:
                while not stream.request.is_done:
                    if is_interrupted():
                        raise Interrupted
                    self.lm.step(stream.request)
                return stream.finish()
        except (MemoryError, torch.OutOfMemoryError):
            raise StrettoError("decoding failed: out of memory; try fewer --pool-slots") from None


def answered(runs: Sequence[Completion], num_warm: int, page_size: int = 1) -> Answered:
    """The row of a prompt that was decoded `runs` times, of the last of them. The seconds of the
    first `num_warm` are left out. `page_size`: the pool's."""
    completion, timed = runs[-1], runs[num_warm:]
    trace, usage = completion.trace, completion.usage
    has_annotations = not is_for_any_model(completion.method)
    return Answered(
        text=completion.text,
        annotated=completion.annotated if completion.annotated != completion.text else None,
        finish_reason=completion.finish_reason,
        threads=[
            ThreadRow(
                id=thread.id,
                parent=thread.parent,
                topic=thread.topic,
                num_tokens=thread.num_tokens,
                start_step=thread.start_step,
                end_step=thread.end_step,
                finish_reason=thread.finish_reason,
            )
            for thread in completion.threads
        ],
        issues=[issue.code for issue in completion.issues],
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        control_tokens=usage.control_tokens,
        drawn_tokens=sum(thread.num_tokens for thread in completion.threads),
        sequential_steps=usage.sequential_steps,
        most_at_once=most_at_once(trace),
        redundant=len(redundant_branches(branches(trace))),
        unjoined=num_unjoined(trace),
        well_formed=is_well_formed(completion) if has_annotations else None,
        repeats=all(run.text == completion.text for run in runs) if len(runs) > 1 else None,
        decode_s=[run.timing.decode_s for run in timed],
        total_s=[run.timing.total_s for run in timed],
        live=live_of(completion, page_size),
    )


def live_of(completion: Completion, page_size: int) -> LiveRow:
    """What an answer kept visible, from its trace; means to 6 decimals."""
    tokens, trace = completion.live_kv, completion.trace
    slots = live_tokens(trace, page_size)
    size = trace.num_tokens
    return LiveRow(
        mean=round(tokens.mean, 6),
        peak=tokens.peak,
        generated_mean=round(tokens.generated_mean, 6),
        generated_peak=tokens.generated_peak,
        dense_generated_mean=(size + 1) / 2 if size else 0.0,
        page_size=page_size,
        slots_mean=round(slots.mean, 6),
        slots_peak=slots.peak,
        generated_slots_mean=round(slots.generated_mean, 6),
        reserved_mean=round(tokens.pool_mean_slots, 6),
        reserved_peak=tokens.pool_peak_slots,
    )


def is_well_formed(completion: Completion) -> bool:
    """Whether nothing is malformed in the annotations and every forked thread wrote its own end,
    rather than being cut by a cap or with the request."""
    is_clean = all(issue.code in HARMLESS for issue in completion.issues)
    return is_clean and all(t.finish_reason == "stop" for t in completion.threads if t.parent)


def most_at_once(trace: Trace) -> int:
    """The most threads that drew a token in one step; 0 for an empty answer."""
    drawn = {(s.thread, step) for s in trace.response for step in s.steps if step is not None}
    return max(Counter(step for _, step in drawn).values(), default=0)


def branches(trace: Trace) -> list[list[int]]:
    """Of each forked thread in order, the text tokens it drew."""
    texts: dict[str, list[int]] = {t.name: [] for t in trace.threads if t.parent is not None}
    for segment in trace.response:
        if segment.thread in texts:
            marked = zip(segment.tokens, segment.origins, segment.markup, strict=True)
            texts[segment.thread] += [t for t, origin, m in marked if is_drawn(origin) and not m]
    return list(texts.values())


def num_unjoined(trace: Trace) -> int:
    """Forked threads with text that no segment of main sees."""
    seen = {trace.segments[k].thread for s in trace.of_thread(MAIN) for k in s.sees if k != s.id}
    own = {s.thread for s in trace.response} - {MAIN}
    return len(own - seen)
