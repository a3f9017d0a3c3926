"""What was to be shown of TIP, and whether it is so.

A claim holds if 95 % intervals over problems show it, at their worse end. Where too little is right
for a difference to say anything, where a baseline holds less than it was to hold, and where answers
are missing, `holds` is None, and `reason` says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from compared import BOTH, Arm, accuracy, difference, length, live, ratio, saved

from stretto.eval.statistics import Estimate, estimate_quotient

DENSE, TIP, PLAIN, BEFORE = "dense-grpo", "tip-kv", "tip-grpo", "tip-sft"
IN_TURN = "in-turn-grpo"
AT_LEAST_SAVED = 59.0
AT_LEAST_BELOW = 20.0
TIES_WITHIN = 5.0
SAME_LENGTH = 0.02
FLOOR = 35.0
"""Percent right: twice and more of what guessing gets of seven values."""
EQUAL = 0.97
"""Of TIP's mean: a baseline that holds less on the test problems is no baseline at that mean."""
SOONER = 1.3
TIES = "window+prompt"
"""What loses nothing where the last steps are all that is needed."""

Arms = Mapping[str, Arm]
Claim = dict[str, Any]


class Undecided(Exception):
    """Why nothing can be said of a claim."""


def claims(arms: Arms, longer: Arms, baselines: Arms) -> list[Claim]:
    """All claims that are of answers. `arms`: on problems as long as those trained on; `longer`: on
    longer ones; `baselines`: on the model of Dense+GRPO."""
    on, on_longer = of_both(arms), of_both(longer)
    found = [
        _claim(
            "TIP+GRPO is not below the interval of Dense+GRPO, programs and trees",
            lambda: _not_below(on),
        ),
        _claim(
            f"it holds at least {AT_LEAST_SAVED:g} % fewer live generated tokens than Dense+GRPO",
            lambda: _less(on),
        ),
        _claim("GRPO lowers live tokens at equal accuracy and length", lambda: _lowers(on)),
        _claim("on longer problems it is not below that interval", lambda: _not_below(on_longer)),
    ]
    at = f"at the same mean is at least {AT_LEAST_BELOW:g} points below it"
    for name, arm in of_both(baselines).items():
        found.append(_claim(f"{name} {at}", lambda arm=arm: _below(on, arm)))
    found.append(
        _claim(
            f"registers in turn, trained, {at}",
            lambda: _below(on, _arm(on, IN_TURN)),
        )
    )
    chains = {name: arm.of(lambda r: r.task == "chain") for name, arm in baselines.items()}
    of_tip = _of_task(arms, "chain")
    found.append(
        _claim(
            f"on chains {TIES} ties (within {TIES_WITHIN:g} points)",
            lambda: _ties(_arm(of_tip, TIP), _arm(chains, TIES)),
        )
    )
    return found


def of_both(arms: Arms) -> dict[str, Arm]:
    """The same on programs and trees; those that answered none are left out."""
    found = {name: arm.of(lambda r: r.task in BOTH) for name, arm in arms.items()}
    return {name: arm for name, arm in found.items() if arm.rows}


def _of_task(arms: Arms, task: str) -> dict[str, Arm]:
    return {name: arm.of(lambda r: r.task == task) for name, arm in arms.items()}


def _claim(text: str, found: Callable[[], tuple[bool, Claim]]) -> Claim:
    try:
        holds, told = found()
    except Undecided as why:
        return {"claim": text, "holds": None, "reason": str(why)}
    return {"claim": text, "holds": holds, **told}


def _arm(arms: Arms, name: str) -> Arm:
    if name not in arms or not arms[name].rows:
        raise Undecided(f"there are no answers of {name}")
    return arms[name]


def _right_enough(*arms: Arm) -> None:
    for arm in arms:
        if (right := _end(arm.estimate(accuracy).value)) < FLOOR:
            raise Undecided(f"{arm.name} is right in {right:.1f} %, less than {FLOOR:g} %")


# -- each claim ------------------------------------------------------------------------------------


def _not_below(on: Arms) -> tuple[bool, Claim]:
    tip, dense = _arm(on, TIP), _arm(on, DENSE)
    _right_enough(dense)
    own, reference = tip.estimate(accuracy), dense.estimate(accuracy)
    return _end(own.value) >= _end(reference.low), {
        "tip": own.to_json(),
        "dense": reference.to_json(),
        "difference": difference(tip, dense, accuracy).to_json(),
    }


def _less(on: Arms) -> tuple[bool, Claim]:
    tip, dense = _arm(on, TIP), _arm(on, DENSE)
    _right_enough(tip, dense)
    less = less_percent(tip, dense)
    return _end(less.low) >= AT_LEAST_SAVED, {
        "less_percent": less.to_json(),
        "at_same_length_percent": tip.estimate(saved).to_json(),
        **{arm.name: arm.estimate(live).to_json() for arm in (tip, dense)},
    }


def less_percent(arm: Arm, reference: Arm) -> Estimate:
    """How much less live tokens an arm's mean has than that of another one, over the problems of
    both."""
    own, other = arm.by_problem(live), reference.by_problem(live)
    both = [name for name in own if name in other]
    found = estimate_quotient([own[n] for n in both], [other[n] for n in both], seed=0)
    if found.value is None or found.low is None or found.high is None:
        return found
    return Estimate(*(100 * (1 - share) for share in (found.value, found.high, found.low)))


def _lowers(on: Arms) -> tuple[bool, Claim]:
    tip, plain, before = (_arm(on, name) for name in (TIP, PLAIN, BEFORE))
    _right_enough(tip, plain, before)
    held = {"sft": ratio(tip, before, live), "weight_0": ratio(tip, plain, live)}
    longer = ratio(tip, before, length)
    over = {n: difference(tip, a, accuracy) for n, a in (("sft", before), ("weight_0", plain))}
    lowers = all(_end(r.estimate.high) < 1 for r in held.values())
    as_right = all(_end(d.estimate.high) >= 0 for d in over.values())
    ends = (longer.estimate.low, longer.estimate.high)
    as_long = all(abs(_end(end) - 1) <= SAME_LENGTH for end in ends)
    return lowers and as_right and as_long, {
        **{f"live_ratio_to_{n}": r.to_json() for n, r in held.items()},
        **{f"accuracy_over_{n}": d.to_json() for n, d in over.items()},
        "length_ratio_to_sft": longer.to_json(),
    }


def _below(on: Arms, arm: Arm) -> tuple[bool, Claim]:
    tip = _arm(on, TIP)
    _right_enough(tip)
    share = _end(arm.estimate(live).value) / _end(tip.estimate(live).value)
    if share < EQUAL:
        raise Undecided(f"{arm.name} holds {share:.2f} times as much, less than {EQUAL}")
    over = difference(tip, arm, accuracy)
    return _end(over.estimate.low) >= AT_LEAST_BELOW, {
        "difference": over.to_json(),
        "accuracy": arm.estimate(accuracy).to_json(),
        "live": arm.estimate(live).to_json(),
        "times_held": share,
    }


def _ties(tip: Arm, arm: Arm) -> tuple[bool, Claim]:
    _right_enough(tip)
    over = difference(tip, arm, accuracy)
    low, high = _end(over.estimate.low), _end(over.estimate.high)
    told = {"difference": over.to_json(), "live": arm.estimate(live).to_json()}
    if low >= -TIES_WITHIN and high <= TIES_WITHIN:
        return True, told
    if low > TIES_WITHIN or high < -TIES_WITHIN:
        return False, told
    raise Undecided(f"the difference is {low:.1f} to {high:.1f} points")


def _end(value: float | None) -> float:
    """Of an interval; NaN, of which nothing holds, where there is none."""
    return float("nan") if value is None else value


# -- speed -----------------------------------------------------------------------------------------


def speed_claims(crowd: Mapping[str, Any], context: Mapping[str, Any]) -> list[Claim]:
    """Of what `crowd.py` and `long_context.py` measured, each over pairs."""
    sooner = _named(crowd["ratios"], "seconds of dense / tip")
    cheaper = _named(context["ratios"], "step_ms of dense / tip")
    return [
        {
            "claim": f"with a pool too small for dense decoding a set is done at least {SOONER:g} "
            "times sooner (embedded model, forced tokens)",
            "holds": sooner["low"] >= SOONER,
            **sooner,
        },
        {
            "claim": "at long contexts a step is cheaper (embedded model)",
            "holds": cheaper["low"] > 1,
            **cheaper,
        },
    ]


def _named(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    return next(dict(row) for row in rows if row["ratio"] == name)


# -- figures that nothing was claimed of -----------------------------------------------------------


def figures(
    arms: Arms, caches: Arms, longer: Arms, speed: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """What other caches cost, what the longer problems say, and shares of time outside of passes.
    `speed`: results of the scripts that measure it, by name."""
    on, on_longer, others = of_both(arms), of_both(longer), of_both(caches)
    changed = {}
    for name, arm in others.items():
        own = on.get(name.partition(" as ")[0])
        if own is not None:
            changed[name] = {
                "accuracy_over_own_cache": difference(arm, own, accuracy).to_json(),
                "live_ratio_to_own_cache": ratio(arm, own, live).to_json(),
            }
    return {
        "other_caches": changed,
        "longer": {
            name: {
                "accuracy": arm.estimate(accuracy).to_json(),
                "live": arm.estimate(live).to_json(),
            }
            for name, arm in on_longer.items()
        },
        "throughput": {name: list(_ratios(found)) for name, found in speed.items()},
        "books_share": {name: dict(_books(found)) for name, found in speed.items()},
    }


def _parts(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The measured parts of a result: itself, or one a pool."""
    parts = {name: part for name, part in result.items() if isinstance(part, dict)}
    return {"": result} if "ratios" in result else {n: p for n, p in parts.items() if "ratios" in p}


def _ratios(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for pool, part in _parts(result).items():
        for row in part["ratios"]:
            yield ({"pool": pool} if pool else {}) | row


def _books(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for pool, part in _parts(result).items():
        for name, measured in part["sides"].items():
            share = statistics.median(m["books_share"] for m in measured)
            yield f"{pool} pool, {name}" if pool else name, round(share, 4)
