"""What Prometheus reads at /metrics. Each application has a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

if TYPE_CHECKING:
    from stretto.lm import LM
    from stretto.runtime.request import Request
    from stretto.server.engine import EngineLoop

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LONG_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Totals:
    """Sums that others keep, as counters: of each its text, and where it is read."""

    def __init__(self, readings: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        for name, (text, read) in self._readings.items():
            yield CounterMetricFamily(name, text, value=read())


class Metrics:
    """Counters of one application; `text` is what Prometheus is given. `engine`: the loop that
    counts here, which is made after them."""

    def __init__(self, lm: LM, engine: Callable[[], EngineLoop]) -> None:
        registry = self._registry = CollectorRegistry()
        self.http = Counter(
            "stretto_http_requests", "HTTP responses.", ["method", "path", "status"],
            registry=registry,
        )  # fmt: skip
        self.refused = Counter(
            "stretto_refused", "Requests refused because too many were under way.",
            registry=registry,
        )  # fmt: skip
        self.failures = Counter("stretto_failed_passes", "Passes that failed.", registry=registry)
        self.passes = Histogram(
            "stretto_pass_seconds", "Wall clock of a pass.", buckets=SHORT_S, registry=registry
        )
        self.between = Counter(
            "stretto_between_passes_seconds",
            "What the engine's thread does for the server, besides passes.", registry=registry,
        )  # fmt: skip
        self.aside = Counter(
            "stretto_thread_pool_cpu_seconds",
            "CPU time of threads that prepare requests and count answers.", registry=registry,
        )  # fmt: skip
        self._finished = Counter(
            "stretto_samples", "Samples that ended.", ["finish_reason"], registry=registry
        )
        self._prompt = Counter("stretto_prompt_tokens", "Prompt tokens.", registry=registry)
        self._cached = Counter(
            "stretto_cached_prompt_tokens", "Prompt tokens not computed again.", registry=registry
        )
        self._drawn = Counter(
            "stretto_drawn_tokens", "Tokens drawn by all threads.", registry=registry
        )
        self._threads = Counter("stretto_threads", "Threads, main included.", registry=registry)
        self._first = Histogram(
            "stretto_first_token_seconds", "Submission to first token.", buckets=LONG_S,
            registry=registry,
        )  # fmt: skip
        self._whole = Histogram(
            "stretto_sample_seconds", "Submission to end.", buckets=LONG_S, registry=registry
        )
        self._read(lm, engine)

    def _read(self, lm: LM, engine: Callable[[], EngineLoop]) -> None:
        scheduler, pool = lm.scheduler, lm.scheduler.pool
        page = pool.page_size
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "stretto_samples_under_way": (
                "Samples admitted and not delivered.",
                lambda: engine().num_admitted,
            ),
            "stretto_running": ("Samples in the batch.", lambda: len(scheduler.running)),
            "stretto_waiting": (
                "Samples waiting for slots, or for their turn to.",
                lambda: len(scheduler.waiting) + engine().num_held,
            ),
            "stretto_pool_slots": ("KV slots in all.", lambda: pool.num_slots),
            "stretto_pool_free_slots": ("KV slots free.", lambda: pool.num_free_pages * page),
            "stretto_pool_cached_slots": (
                "Free KV slots with a prompt's beginning on them.",
                lambda: pool.num_cached_pages * page,
            ),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, registry=self._registry).set_function(read)
        totals: dict[str, tuple[str, Callable[[], float]]] = {
            "stretto_preemptions": ("Preemptions.", lambda: scheduler.num_preemptions),
            "stretto_forward_seconds": ("Of passes, in the engine.", lambda: scheduler.forward_s),
            "stretto_event_loop_cpu_seconds": ("CPU time of the event loop.", time.thread_time),
        }
        self._registry.register(Totals(totals))

    def finished(self, request: Request) -> None:
        """A sample has ended, however."""
        timing = request.timing
        self._finished.labels(request.finish_reason).inc()
        self._prompt.inc(request.num_prompt_tokens)
        self._cached.inc(request.memory.num_adopted)
        self._drawn.inc(request.num_drawn)
        self._threads.inc(len(request.recorder.threads))
        if timing.first_token is not None:
            self._first.observe(timing.first_token - timing.submitted)
        if timing.finished is not None:
            self._whole.observe(timing.finished - timing.submitted)

    def text(self) -> bytes:
        """The metrics in Prometheus's text format. For the event loop, whose time is read."""
        return generate_latest(self._registry)
