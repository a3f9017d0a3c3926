"""What was to be shown of planned models, and whether it is so.

A claim holds if 95 % intervals over problems show it, at their worse end: at least so much faster,
and at most so many points of quality lost. Which way to decode is compared was chosen before, on
other problems (`choose.py`). Where the quality compared is near that of guessing, nothing can be
shown: then `holds` is None, and `reason` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cells import ABLATIONS, LONGER, NO_SYNC, REFERENCE, THREADS
from figures import (
    Measured,
    decode_s,
    mean_quality,
    paired,
    percent,
    points_over,
    seconds,
    steps,
    times_faster,
    times_less,
)

from stretto.eval.statistics import Estimate, arithmetic_mean, geometric_mean

TO_BEAT = ((1.27, 1.0), (1.81, 5.4))
"""A speed-up over autoregressive decoding, and the points of quality that it may cost."""
PLANNED, WHOLE = ("sparse", "dense"), "sparse"
"""Ways that plan, and the one that ablations are of."""
RIVALS = ("diffusion", "blocks")
FLOORS = {"right": 20.0, "parts": 50.0}
"""Percent: more than the commonest total would get, and the commonest result of a kind of part."""
THROUGHPUT, TOGETHER = 2.5, 8
FEWER_STEPS, THREAD_POINTS = 2.0, 2.0
"""What threads were to save, and the points of right totals that they may cost."""
COLLAPSE = 50.0
"""Points of totals that are those of their own parts, lost where nothing reads the parts."""
Trained = Mapping[str, Mapping[str, Any]]


def goal_name(speedup: float, points: float) -> str:
    return f"{speedup} within {points}"


def group_of(found: Mapping[str, Measured], *groups: str) -> list[Measured]:
    return [m for m in found.values() if m.cell.group in groups]


def pick(
    planned: Sequence[Measured], rival: Measured, quality: str, speedup: float = 1.0
) -> Measured:
    """The best way in a quality of those that are so many times as fast as the rival, the faster
    one of two as good; the fastest of all if none is. All by their means over the problems that
    both have answered."""

    def faster(way: Measured) -> float:
        own, other = (measured.of(seconds) for measured in paired(way, rival))
        return geometric_mean([b / a for a, b in zip(own, other, strict=True)])

    def good(way: Measured) -> tuple[float, float]:
        own, _ = paired(way, rival)
        return arithmetic_mean(own.of(percent(quality))), faster(way)

    fast = [way for way in planned if faster(way) >= speedup]
    return max(fast, key=good) if fast else max(planned, key=faster)


def claims(
    tested: Mapping[str, Measured],
    chosen: Mapping[str, Mapping[str, Mapping[str, str]]],
    quality: str,
    trained: Trained,
) -> list[dict[str, Any]]:
    """All claims but those of threads and throughput, in one quality. `tested`: answers by cell, to
    problems that nothing was chosen on. `chosen`: as `choose.py` writes it."""
    found = []
    for goal in TO_BEAT:
        own = chosen["goals"][quality][goal_name(*goal)]
        for reference in (REFERENCE, LONGER):
            missing = _missing(_goal_words(goal, reference), tested, own, reference)
            if missing is None:
                both = tested[own], tested[reference]
                found.append(_goal(both, both, quality, goal, trained))
            else:
                found.append(missing)
    for group in RIVALS:
        against = chosen["rivals"][quality]
        rivals = group_of(tested, group)
        pairs = [(tested.get(against.get(rival.cell.name, "")), rival) for rival in rivals]
        found.append(_beaten(group, pairs, quality))
    for ablation in ABLATIONS:
        missing = _missing(_worse_words(ablation), tested, ablation, WHOLE)
        if missing is None:
            found.append(_is_worse(tested[ablation], tested[WHOLE], quality))
        else:
            found.append(missing)
    return found


def costly_claims(
    tested: Mapping[str, Measured],
    costly: Mapping[str, Measured],
    chosen: Mapping[str, Mapping[str, Mapping[str, str]]],
    quality: str,
    trained: Trained,
) -> list[dict[str, Any]]:
    """The goals at the cost of a larger model: points by all answers that there are, times by those
    that were timed so. `same_texts`: of these, how many have the text they have without it."""
    found = []
    for goal in TO_BEAT:
        names = chosen["costly"][quality][goal_name(*goal)], REFERENCE
        words = _goal_words(goal, REFERENCE)
        missing = _missing(words, tested, *names) or _missing(words, costly, *names)
        if missing is None:
            judged, timed = ((m[names[0]], m[names[1]]) for m in (tested, costly))
            claim = _goal(judged, timed, quality, goal, trained)
            texts = [_num_same(*both) for both in zip(judged, timed, strict=True)]
            missing = {**claim, "timed": len(timed[0].rows), "same_texts": texts}
        found.append(missing)
    return found


def _num_same(one: Measured, other: Measured) -> int:
    """Problems that both have answered with the same text."""
    both = set(one.rows) & set(other.rows)
    return sum(one.rows[name].text == other.rows[name].text for name in both)


def _missing(words: str, tested: Mapping[str, Measured], *names: str) -> dict[str, Any] | None:
    """The claim, undecided, if some of the cells that it is of have no answers."""
    lacking = [name for name in names if name not in tested]
    if not lacking:
        return None
    return {"claim": words, "holds": None, "reason": f"there are no answers of {lacking}"}


def _goal_words(goal: tuple[float, float], reference: str) -> str:
    return f"{goal[0]} times as fast as {reference}, at most {goal[1]} points worse"


def _goal(
    judged: tuple[Measured, Measured], timed: tuple[Measured, Measured], quality: str,
    goal: tuple[float, float], trained: Trained,
) -> dict[str, Any]:  # fmt: skip
    """Of a way and its reference: points by the one pair of answers, times by the other."""
    own, reference = judged
    faster, more = times_faster(*timed), points_over(own, reference, quality)
    share = tokens_ratio(own, reference, trained)
    training = "" if share is None else f", after {share:.2f} times its training tokens"
    return {
        "claim": _goal_words(goal, reference.cell.name) + training,
        "holds": _above(faster, goal[0]) and _at_least(more, -goal[1]),
        "cell": own.cell.name,
        "problems": len(set(own.rows) & set(reference.rows)),
        "training_tokens_ratio": share,
        **_told("speedup", faster),
        **_told("decode_speedup", times_faster(*timed, decode_s)),
        **_told("points", more),
        **_floor(reference, quality),
    }


def _beaten(
    group: str, pairs: Sequence[tuple[Measured | None, Measured]], quality: str
) -> dict[str, Any]:
    """Whether each way of a group is no faster and no better than the planned one that was chosen
    against it; a way that none was chosen against is not beaten."""
    verdicts = {rival.cell.name: _verdict(own, rival, quality) for own, rival in pairs}
    told = [verdict["verdict"] for verdict in verdicts.values()]
    claim: dict[str, Any] = {
        "claim": f"planned is as fast and as good as each way of {group}",
        "holds": len(told) > 0 and all(verdict == "beaten" for verdict in told),
        "of": len(told),
        **{verdict: told.count(verdict) for verdict in ("beaten", "tie", "not beaten", "floor")},
        "against": verdicts,
    }
    if not told:
        return {**claim, "holds": None, "reason": f"there are no answers of {group}"}
    if set(told) == {"floor"}:
        return {**claim, "holds": None, "reason": f"none is surely above {FLOORS[quality]} %"}
    return claim


def _verdict(own: Measured | None, rival: Measured, quality: str) -> dict[str, Any]:
    if own is None:
        return {"verdict": "not beaten", "by": None}
    more, faster = points_over(own, rival, quality), times_faster(own, rival)
    if _floor(own, quality):
        verdict = "floor"
    elif _at_least(more, 0.0) and _at_least(faster, 1.0):
        verdict = "beaten"
    elif _below(more, 0.0) or _below(faster, 1.0):
        verdict = "not beaten"
    else:
        verdict = "tie"
    by = {"by": own.cell.name, **_told("points", more), **_told("speedup", faster)}
    return {"verdict": verdict, **by}


def _worse_words(ablation: str) -> str:
    return f"{ablation} is worse than {WHOLE}"


def _is_worse(ablation: Measured, whole: Measured, quality: str) -> dict[str, Any]:
    more = points_over(whole, ablation, quality)
    return {
        "claim": _worse_words(ablation.cell.name),
        "holds": _above(more, 0.0),
        **_told("points", more),
        **_floor(whole, quality),
    }


def thread_claims(tested: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """Of threads: as good in fewer steps, and of no use to a main that does not read them."""
    saved = (
        f"{THREADS} has right totals within {THREAD_POINTS} points of {REFERENCE}, in at least "
        f"{FEWER_STEPS} times fewer steps"
    )
    lost = f"{NO_SYNC} adds up its own results at least {COLLAPSE} points less often than {THREADS}"
    return [
        _missing(saved, tested, THREADS, REFERENCE) or _saved(saved, tested),
        _missing(lost, tested, THREADS, NO_SYNC) or _lost(lost, tested),
    ]


def _saved(claim: str, tested: Mapping[str, Measured]) -> dict[str, Any]:
    own, reference = tested[THREADS], tested[REFERENCE]
    more, fewer = points_over(own, reference, "right"), times_less(own, reference, steps)
    return {
        "claim": claim,
        "holds": _at_least(more, -THREAD_POINTS) and _at_least(fewer, FEWER_STEPS),
        "problems": len(set(own.rows) & set(reference.rows)),
        **_told("points", more),
        **_told("fewer_steps", fewer),
        **_told("speedup", times_faster(own, reference)),
        **_floor(reference, "right"),
    }


def _lost(claim: str, tested: Mapping[str, Measured]) -> dict[str, Any]:
    whole, blind = tested[THREADS], tested[NO_SYNC]
    less = points_over(whole, blind, "sums")
    return {
        "claim": claim,
        "holds": _at_least(less, COLLAPSE),
        "problems": len(set(whole.rows) & set(blind.rows)),
        **_told("points", less),
        **_told("sums", mean_quality(whole, "sums")),
        **_told("sums_without", mean_quality(blind, "sums")),
        **_told("parts_points", points_over(whole, blind, "parts")),
    }


def throughput_claims(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of what `throughput.py` wrote: a claim a planned way."""
    return [
        {
            "claim": f"{TOGETHER} requests at once to {row['cell']} have at least {THROUGHPUT} "
            "times the throughput of one at a time",
            "holds": row["ratio_low"] >= THROUGHPUT,
            **{name: row[name] for name in ("ratio", "ratio_low", "ratio_high", "sets")},
        }
        for row in measured["ways"]
        if row["group"] in PLANNED
    ]


def tokens_ratio(own: Measured, reference: Measured, trained: Trained) -> float | None:
    """Tokens that training put through the one's model, by those through the other's."""
    both = [trained.get(m.cell.arm, {}).get("tokens") for m in (own, reference)]
    return None if None in both else both[0] / both[1]


# -- intervals -----------------------------------------------------------------------------------


def _floor(measured: Measured, quality: str) -> dict[str, Any]:
    """What a claim becomes if a quality that it rests on may be that of guessing; else nothing."""
    low = mean_quality(measured, quality).low
    if low is not None and low >= FLOORS[quality]:
        return {}
    reason = f"{measured.cell.name} is not surely above {FLOORS[quality]} %"
    return {"holds": None, "reason": reason}


def _told(name: str, estimate: Estimate) -> dict[str, float | None]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _end(test: Callable[[float], bool], end: float | None) -> bool:
    return end is not None and test(end)


def _above(estimate: Estimate, least: float) -> bool:
    return _end(lambda low: low > least, estimate.low)


def _at_least(estimate: Estimate, least: float) -> bool:
    return _end(lambda low: low >= least, estimate.low)


def _below(estimate: Estimate, most: float) -> bool:
    return _end(lambda high: high < most, estimate.high)
