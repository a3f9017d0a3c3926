"""The predicate of visibility and what is derived from it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestras import make_request, run_all
from stubs import StubEngine

from stretto.effects import Cut, Evict, Fork, Join, Place
from stretto.masks import dense_mask, flat_positions, flat_tokens, mask_mod
from stretto.recorder import MAIN, Recorder
from stretto.runtime.pool import Pool
from stretto.runtime.scheduler import Scheduler
from stretto.trace import Segment, Trace, labels, live_tokens, text_runs, visible


def segment(id: int, kind: str, sees: set[int], length: int) -> Segment:  # noqa: A002
    return Segment(
        id, MAIN, kind, "main", frozenset(sees), tuple(range(length)), tuple(range(length)),
        ("sampled",) * length, (False,) * length, (None,) * length,
    )  # fmt: skip


def test_visible_is_the_definition() -> None:
    causal, block = segment(0, "causal", set(), 3), segment(1, "block", {0}, 3)
    for i, j in product(range(3), range(3)):
        assert visible(causal, i, causal, j) == (j <= i)
        assert visible(block, i, block, j)
        assert visible(block, i, causal, j)
        assert not visible(causal, i, block, j)


def flat(trace: Trace) -> list[tuple[Segment, int]]:
    return [(s, i) for s in trace.segments for i in range(len(s))]


def random_trace(seed: int) -> Trace:
    request = make_request(seed)
    run_all(Scheduler(StubEngine(96), Pool(1024)), [request])
    return request.recorder.freeze()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_masks_and_figures_of_random_traces_are_visible_counted(seed: int) -> None:
    trace = random_trace(seed)
    places = flat(trace)
    expected = torch.tensor([[visible(q, i, k, j) for k, j in places] for q, i in places])
    assert torch.equal(dense_mask(trace), expected)
    assert flat_tokens(trace).tolist() == [s.tokens[i] for s, i in places]
    assert flat_positions(trace).tolist() == [s.positions[i] for s, i in places]
    live = live_tokens(trace)
    is_response = torch.tensor([s.origins[0] != "prompt" for s, _ in places])
    counts = expected.sum(dim=1)[is_response].double()
    own = expected[:, is_response].sum(dim=1)[is_response].double()
    assert live.mean == pytest.approx(float(counts.mean()))
    assert live.peak == int(counts.max())
    assert live.generated_mean == pytest.approx(float(own.mean()))
    assert live.generated_peak == int(own.max())


def test_block_segments_in_masks() -> None:
    trace = Trace(
        (segment(0, "causal", set(), 2), segment(1, "block", {0}, 3), segment(2, "causal", {1}, 2)),
        (),
    )
    places = flat(trace)
    expected = torch.tensor([[visible(q, i, k, j) for k, j in places] for q, i in places])
    assert torch.equal(dense_mask(trace), expected)
    mod = mask_mod(trace)
    zero = torch.tensor(0)
    assert bool(mod(zero, zero, torch.tensor(2), torch.tensor(4)))
    assert not bool(mod(zero, zero, torch.tensor(5), torch.tensor(6)))


def test_mask_mod_in_flex_attention_equals_dense_attention() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    trace = random_trace(5)
    n = len(flat(trace))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, generator=generator) for _ in range(3))
    block_mask = create_block_mask(mask_mod(trace), 1, 1, n, n, device="cpu")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex_attention advises to compile it
        flex = flex_attention(q, k, v, block_mask=block_mask)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(trace))
    assert torch.allclose(flex, dense, atol=1e-5)


def small() -> Recorder:
    """Prompt 1 2; main 3 4; child (injected 9) 5 6; main 7, joined by 8."""
    recorder = Recorder([1, 2], "main")
    main = recorder.threads[MAIN]
    for token in (3, 4):
        recorder.place(main, Place(token))
    recorder.apply(main, Fork("main.1", inject=(9,), resume=20))
    child = recorder.threads["main.1"]
    recorder.place(child, Place(5))
    recorder.place(child, Place(6, markup=True))
    recorder.close(child, "stop")
    recorder.place(main, Place(7))
    recorder.apply(main, Join(("main.1",)))
    recorder.place(main, Place(8))
    recorder.close(main, "stop")
    return recorder


def test_a_fork_and_a_join() -> None:
    trace = small().freeze()
    assert [(s.thread, s.tokens, sorted(s.sees)) for s in trace.segments] == [
        ("main", (1, 2), []),
        ("main", (3, 4), [0]),
        ("main.1", (9, 5, 6), [0, 1]),
        ("main", (7,), [0, 1]),
        ("main", (8,), [0, 1, 2, 3]),
    ]
    assert [s.positions for s in trace.segments] == [(0, 1), (2, 3), (4, 5, 6), (20,), (21,)]
    assert list(text_runs(trace)) == [(3, 4), (5,), (7, 8)]
    assert trace.num_tokens == 7
    # 3 4 | child 5 6 at steps 3 4 | 7 at 3, 8 at 4
    assert trace.critical_path_steps == 4


def test_labels() -> None:
    """The last prompt token predicts the first response token, a fork's last token the next token
    of its own thread, an injected token the child's first, a child's last token nothing."""
    assert labels(small().freeze(), 99) == [[None, 3], [4, 7], [5, 6, None], [8], [99]]
    assert labels(small().freeze(), None)[-1] == [None]


def test_a_forced_token_is_no_target() -> None:
    recorder = Recorder([1], "main")
    main = recorder.threads[MAIN]
    recorder.place(main, Place(2))
    recorder.place(main, Place(3, "forced"))
    recorder.place(main, Place(4, "injected"))
    assert labels(recorder.freeze(), None) == [[2], [None, None, None]]


def test_a_join_gives_only_what_the_child_still_sees_of_its_own() -> None:
    recorder = Recorder([1], "main")
    main = recorder.threads[MAIN]
    recorder.place(main, Place(2))
    child = recorder.fork(main, Fork("main.1", inject=(3,)))
    recorder.apply(child, Cut())
    recorder.place(child, Place(4))
    recorder.apply(child, Evict(child.segments[0]))
    recorder.place(child, Place(5))
    recorder.close(child, "stop")
    recorder.apply(main, Join(("main.1",)))
    recorder.place(main, Place(6))
    trace = recorder.freeze()
    joined = trace.segments[-1].sees
    assert [trace.segments[k].tokens for k in sorted(joined)] == [(1,), (2,), (4,), (5,)]


def test_a_childs_eviction_is_not_the_parents() -> None:
    recorder = Recorder([1], "main")
    main = recorder.threads[MAIN]
    recorder.place(main, Place(2))
    child = recorder.fork(main, Fork("main.1"))
    recorder.apply(child, Evict(0))
    recorder.place(child, Place(3))
    recorder.place(main, Place(4))
    trace = recorder.freeze()
    assert [(s.tokens, sorted(s.sees)) for s in trace.segments] == [
        ((1,), []),
        ((2,), [0]),
        ((3,), [1]),
        ((4,), [0, 1]),
    ]
    assert child.is_open


def test_threads_forked_at_once_stand_together_after_the_segment_they_were_forked_from() -> None:
    recorder = Recorder([1], "main")
    main = recorder.threads[MAIN]
    recorder.place(main, Place(2))
    for name in ("main.1", "main.2"):
        recorder.fork(main, Fork(name, inject=(3,)))
    recorder.place(main, Place(4))
    order = [(s.thread, s.tokens) for s in recorder.freeze().segments]
    assert order == [
        ("main", (1,)),
        ("main", (2,)),
        ("main.1", (3,)),
        ("main.2", (3,)),
        ("main", (4,)),
    ]


def test_a_parent_that_ends_lets_go_of_what_it_could_have_joined() -> None:
    recorder = Recorder([1], "main")
    main = recorder.threads[MAIN]
    child = recorder.fork(main, Fork("main.1", inject=(2,)))
    grandchild = recorder.fork(child, Fork("main.1.1", inject=(3,)))
    for thread in (main, child, grandchild):
        recorder.fed(thread, len(thread.unfed))
    recorder.close(grandchild, "stop")
    assert recorder.take_released() == []
    recorder.close(child, "stop")
    released = {t for h in recorder.take_released() for t in recorder.segments[h].tokens}
    assert released == {3}  # main may still join the child's own 2


def test_a_token_whose_placing_was_interrupted_is_taken_back() -> None:
    class Interrupted(list[int]):
        def append(self, item: int) -> None:
            raise KeyboardInterrupt

    recorder = Recorder([1], "main")
    main = recorder.threads[MAIN]
    recorder.place(main, Place(2))
    main.own.markup = Interrupted(main.own.markup)
    with pytest.raises(KeyboardInterrupt):
        recorder.place(main, Place(3))
    recorder.mend()
    assert [s.tokens for s in recorder.freeze().segments] == [(1,), (2,)]


def test_misuse_of_the_recorder_is_an_error() -> None:
    recorder = Recorder([1], "main")
    main = recorder.threads[MAIN]
    recorder.fork(main, Fork("main.1"))
    with pytest.raises(ValueError, match="exists already"):
        recorder.fork(main, Fork("main.1"))
    with pytest.raises(ValueError, match="before it is closed"):
        recorder.join(main, Join(("main.1",)))
    with pytest.raises(ValueError, match="cannot see"):
        recorder.evict(main, 17)


def test_an_empty_response_has_figures() -> None:
    trace = Recorder([1, 2], "main").freeze()
    assert trace.parallelism == 0.0
    assert live_tokens(trace).mean == 0.0
    assert trace.critical_path_steps == 0
