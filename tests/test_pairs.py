"""Best and worst of a prompt's candidates: decisions with their numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from stretto.data.store import Store
from stretto.errors import InvalidInput
from stretto.train.pairs import Pair, Scored, make_pair, make_pairs, summarise


def row(sample: int, steps: int = 20, quality: float | None = 1.0, **changes: Any) -> Scored:
    values = {
        "prompt_id": "a" * 16, "sample": sample, "baseline_tokens": 100, "text_tokens": 60,
        "control_tokens": 8, "steps": steps, "quality": quality, "judge": "likelihood:m;{}",
    }  # fmt: skip
    return Scored(**(values | changes))


def test_lambda_zero_ranks_by_speedup_and_infinity_by_quality() -> None:
    """Invariant 29: the fast bad one, the slow good one, and one between."""
    rows = [row(0, 20, 0.5), row(1, 50, 3.0), row(2, 30, 1.5)]
    fast, good = make_pair(rows, lam=0), make_pair(rows, lam=math.inf)
    assert (fast.best, fast.worst) == (0, 1)
    assert (good.best, good.worst) == (1, 0)
    both = make_pair(rows, lam=4)
    assert both.scores == {"0": 5 + 2, "1": 2 + 12, "2": pytest.approx(100 / 30 + 6)}
    assert (both.best, both.worst) == (1, 0)


def test_the_variant_decides_what_fast_means() -> None:
    rows = [row(0, 20, text_tokens=20), row(1, 25, text_tokens=100)]
    assert make_pair(rows, lam=0).best == 0
    assert make_pair(rows, lam=0, variant="parallelism").best == 1


def test_equal_scores_make_no_pair() -> None:
    pair = make_pair([row(0), row(1), row(2)], lam=1)
    assert (pair.best, pair.worst, pair.skipped) == (None, None, "tie")
    assert pair.scores == {"0": 6.0, "1": 6.0, "2": 6.0}


def test_rounding_is_no_difference() -> None:
    rows = [row(0, 3, 0.1), row(1, 3, 0.1 + 1e-12)]
    assert make_pair(rows, lam=1).skipped == "tie"


def test_a_cut_answer_may_be_the_worst_and_never_the_best() -> None:
    """Cut answers look fast; that must not make them examples."""
    rows = [row(0, 5, 1.0, flaws=["cut"]), row(1, 20, 1.0), row(2, 40, 1.0)]
    pair = make_pair(rows, lam=0)
    assert (pair.best, pair.worst) == (1, 2)
    assert pair.flaws == {"0": ["cut"]}
    slow = [row(0, 90, flaws=["cut-branch"]), row(1, 20), row(2, 40)]
    assert make_pair(slow, lam=0).worst == 0


def test_an_answer_without_a_log_prob_is_no_candidate() -> None:
    rows = [row(0, 90, flaws=["cut", "unclosed"]), row(1, 20), row(2, 40)]
    pair = make_pair(rows, lam=0)
    assert (pair.worst, pair.scores["0"], pair.num_candidates) == (2, None, 2)


def test_without_a_sound_answer_that_is_better_there_is_no_pair() -> None:
    flawed = [row(0, 10, flaws=["cut"]), row(1, 20, flaws=["empty"])]
    assert make_pair(flawed, lam=0).skipped == "no-sound-best"
    below = [row(0, 10, flaws=["cut"]), row(1, 20)]
    assert make_pair(below, lam=0).skipped == "best-is-worst"
    assert make_pair([row(0)], lam=0).skipped == "one-candidate"


def test_a_missing_quality_takes_a_candidate_out_where_it_counts() -> None:
    rows = [row(0, 20, None), row(1, 30, 1.0), row(2, 40, 2.0)]
    pair = make_pair(rows, lam=1)
    assert (pair.scores["0"], pair.best, pair.worst) == (None, 2, 1)
    assert make_pair(rows, lam=0).best == 0


def test_two_judges_are_not_mixed() -> None:
    rows = [row(0, 20), row(1, 30, judge="llm:m;{}")]
    with pytest.raises(InvalidInput, match="scored by different judges"):
        make_pair(rows, lam=1)
    assert make_pair(rows, lam=0).judge is None


def test_a_score_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no number"):
        make_pair([row(0, quality=math.nan), row(1)], lam=1)


def test_pairs_come_by_prompt_and_are_counted() -> None:
    other = "b" * 16
    rows = [row(0, 10), row(0, 10, prompt_id=other), row(1, 20, flaws=["cut"], redundant=2)]
    rows += [row(1, 10, prompt_id=other)]
    pairs = make_pairs(rows, lam=0)
    assert [(p.prompt_id, p.skipped) for p in pairs] == [("a" * 16, None), (other, "tie")]
    counts = summarise(pairs, rows)
    assert (counts["prompts"], counts["pairs"], counts["flawed_worst"]) == (2, 1, 1)
    assert counts["skipped"] == {"tie": 1}
    assert counts["best"]["speedup"] == 10
    assert counts["worst"]["redundant"] == 2


def test_decisions_survive_the_file(tmp_path: Path) -> None:
    pairs = make_pairs([row(0, 10), row(1, 20, None)], lam=math.inf)
    with Store(tmp_path / "pairs.jsonl", Pair) as store:
        for pair in pairs:
            store.add(pair)
    with Store(tmp_path / "pairs.jsonl", Pair) as store:
        assert list(store.rows.values()) == pairs
        assert pairs[0].scores == {"0": 1.0, "1": None}
        assert pairs[0].lam == "inf"


def test_of_like_length_the_two_that_differ_most_are_paired() -> None:
    """The best and the worst of all are far apart in length; within 1.25 times another two are."""
    rows = [
        row(0, quality=9.0, text_tokens=200),
        row(1, quality=1.0, text_tokens=40),
        row(2, quality=5.0, text_tokens=50),
        row(3, quality=6.0, text_tokens=170),
        row(4, quality=7.5, text_tokens=161, flaws=["cut"]),
    ]
    free, alike = (make_pair(rows, lam=math.inf, length_ratio=r) for r in (None, 1.25))
    assert (free.best, free.worst, free.length_ratio) == (0, 1, None)
    assert (alike.best, alike.worst, alike.length_ratio) == (2, 1, 1.25)
    assert make_pair(rows, lam=math.inf, length_ratio=1.2).best == 0
    assert make_pair(rows[:2], lam=math.inf, length_ratio=2).skipped == "lengths-differ"


@pytest.mark.parametrize("ratio", [0.5, -1.0, math.nan])
def test_a_length_ratio_below_one_is_refused(ratio: float) -> None:
    with pytest.raises(InvalidInput, match="at least 1"):
        make_pair([row(0), row(1)], lam=0, length_ratio=ratio)
