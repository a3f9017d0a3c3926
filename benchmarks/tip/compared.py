"""Tables of the TIP experiment, from its rows: what each arm is right in, and what it holds.

A problem is what is drawn anew for an interval, with all training seeds that answered it: its value
is the mean over them. Beside the interval stand the least and the largest mean of a seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from answered import PAGES, Solved

from stretto.bench.pairs import rounded
from stretto.eval.statistics import Estimate, estimate_mean, paired_difference, paired_ratio

BOTH = ("program", "tree")
"""Where old steps are needed: on these the claims are made."""


@dataclass(frozen=True)
class Arm:
    """One way to answer, by training seed: the rows of each."""

    name: str
    seeds: Mapping[str, Sequence[Solved]]

    def of(self, keep: Callable[[Solved], bool]) -> Arm:
        """The same with fewer problems; a seed without any is left out."""
        kept = {seed: [row for row in rows if keep(row)] for seed, rows in self.seeds.items()}
        return Arm(self.name, {seed: rows for seed, rows in kept.items() if rows})

    @property
    def rows(self) -> list[Solved]:
        return [row for rows in self.seeds.values() for row in rows]

    def by_problem(self, value: Callable[[Solved], float]) -> dict[str, float]:
        """Of each problem the mean over seeds."""
        found: dict[str, list[float]] = {}
        for row in self.rows:
            found.setdefault(row.problem, []).append(value(row))
        return {name: statistics.fmean(values) for name, values in found.items()}

    def estimate(self, value: Callable[[Solved], float]) -> Estimate:
        return estimate_mean(list(self.by_problem(value).values()), seed=0)

    def spread(self, value: Callable[[Solved], float]) -> tuple[float, float]:
        """The least and the largest mean of a seed."""
        means = [statistics.fmean(map(value, rows)) for rows in self.seeds.values()]
        return min(means), max(means)


def accuracy(row: Solved) -> float:
    """In percent."""
    return 100.0 * row.is_right


def live(row: Solved) -> float:
    return row.generated_mean


def saved(row: Solved) -> float:
    """Percent less than what dense decoding of as many tokens holds of them."""
    dense = row.dense_generated_mean
    return 100 * (1 - row.generated_mean / dense) if row.num_tokens else 0.0


def table_row(arm: Arm, reference: Arm | None) -> dict[str, Any]:
    """A row of a table. `reference`: Dense+GRPO, to which differences are paired by problem."""
    row: dict[str, Any] = {"arm": arm.name, "seeds": len(arm.seeds)}
    row["problems"] = len(arm.by_problem(accuracy))
    for name, value in (("accuracy", accuracy), ("live", live), ("saved", saved)):
        row |= _told(name, arm.estimate(value))
        row[f"{name}_least"], row[f"{name}_most"] = arm.spread(value)
    every = arm.rows
    ended = [r for r in every if r.finish == "stop"]
    row["accuracy_if_ended"] = statistics.fmean(map(accuracy, ended)) if ended else None
    row["cut"] = 100 * (1 - len(ended) / len(every))
    row["exact"] = 100 * statistics.fmean(r.is_exact for r in every)
    row["tokens"] = statistics.fmean(r.num_tokens for r in every)
    row["live_peak"] = statistics.fmean(r.generated_peak for r in every)
    row["with_prompt"] = statistics.fmean(r.live_mean for r in every)
    row["with_prompt_peak"] = statistics.fmean(r.live_peak for r in every)
    for name in ("reserved_mean", "reserved_peak"):
        held = [value for r in every if (value := getattr(r, name)) is not None]
        row[name] = statistics.fmean(held) if held else None
    for page in PAGES[1:]:
        slots = [r.slots[str(page)] for r in every]
        row[f"slots_{page}"] = statistics.fmean(s[2] for s in slots)
        row[f"slots_{page}_peak"] = statistics.fmean(s[3] for s in slots)
        row[f"slots_{page}_with_prompt"] = statistics.fmean(s[0] for s in slots)
    over = difference(arm, reference, accuracy) if reference is not None else None
    row |= _told("accuracy_over_dense", over)
    return rounded(row)


def _told(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    if estimate is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def difference(a: Arm, b: Arm, value: Callable[[Solved], float]) -> Estimate:
    """The mean of a - b, over the problems of both."""
    return paired_difference(*_paired(a, b, value), seed=0)


def ratio(a: Arm, b: Arm, value: Callable[[Solved], float]) -> Estimate:
    """The geometric mean of a / b over the problems of both."""
    return paired_ratio(*_paired(a, b, value), seed=0)


def _paired(a: Arm, b: Arm, value: Callable[[Solved], float]) -> tuple[list[float], list[float]]:
    one, other = a.by_problem(value), b.by_problem(value)
    both = [name for name in one if name in other]
    return [one[name] for name in both], [other[name] for name in both]


# -- what was to be shown --------------------------------------------------------------------------

AT_LEAST_SAVED = 59.0
AT_LEAST_BELOW = 20.0
TIES_WITHIN = 5.0


def claims(arms: Mapping[str, Arm], baselines: Mapping[str, Arm]) -> list[dict[str, Any]]:
    """Each claim with its figures and whether it holds. `arms` by name, `baselines` as they are on
    the model of Dense+GRPO; problems as long as those trained on."""
    on = {name: arm.of(lambda r: r.task in BOTH) for name, arm in arms.items()}
    dense, tip = on["dense-grpo"], on["tip-kv"]
    accurate, reference = tip.estimate(accuracy), dense.estimate(accuracy)
    held = {arm.name: arm.estimate(live) for arm in (tip, dense)}
    less = 100 * (1 - _value(held[tip.name]) / _value(held[dense.name]))
    found = [
        _claim(
            "TIP+GRPO is not below the interval of Dense+GRPO, programs and trees",
            _value(accurate) >= _low(reference),
            {"tip": accurate.to_json(), "dense": reference.to_json(),
             "difference": difference(tip, dense, accuracy).to_json()},
        ),
        _claim(
            f"it holds at least {AT_LEAST_SAVED:g} % fewer live generated tokens",
            less >= AT_LEAST_SAVED,
            {"less_percent": less, "at_same_length_percent": tip.estimate(saved).to_json(),
             **{name: estimate.to_json() for name, estimate in held.items()}},
        ),
    ]  # fmt: skip
    for name, arm in baselines.items():
        own = arm.of(lambda r: r.task in BOTH)
        over = difference(tip, own, accuracy)
        found.append(
            _claim(
                f"{name} at the same mean is at least {AT_LEAST_BELOW:g} points below it",
                _value(over) >= AT_LEAST_BELOW,
                {"difference": over.to_json(), "live": own.estimate(live).to_json()},
            )
        )
    return [*found, *_chains(arms, baselines), _lowers(on)]


def _chains(arms: Mapping[str, Arm], baselines: Mapping[str, Arm]) -> list[dict[str, Any]]:
    """Where the last steps are all that is needed, a window should be as good."""
    tip = arms["tip-kv"].of(lambda r: r.task == "chain")
    found = []
    for name in ("window+prompt", "streaming_llm+prompt"):
        own = baselines[name].of(lambda r: r.task == "chain") if name in baselines else None
        if own is None or not own.rows or not tip.rows:
            continue
        over = difference(tip, own, accuracy)
        told = {"difference": over.to_json(), "live": own.estimate(live).to_json()}
        ties = abs(_value(over)) <= TIES_WITHIN
        found.append(_claim(f"on chains {name} ties (within {TIES_WITHIN:g} points)", ties, told))
    return found


def _lowers(on: Mapping[str, Arm]) -> dict[str, Any]:
    tip, plain, before = (on[name] for name in ("tip-kv", "tip-grpo", "tip-sft"))
    held, length = ratio(tip, before, live), ratio(tip, before, lambda r: r.num_tokens)
    over = difference(tip, plain, accuracy)
    holds = _high(held) < 1 and _high(over) >= 0 and abs(_value(length) - 1) <= 0.02
    told = {
        "live_ratio_to_sft": held.to_json(),
        "live_ratio_to_weight_0": ratio(tip, plain, live).to_json(),
        "length_ratio_to_sft": length.to_json(),
        "accuracy_over_weight_0": over.to_json(),
        "accuracy_over_sft": difference(tip, before, accuracy).to_json(),
    }
    return _claim("GRPO lowers live tokens at equal accuracy and length", holds, told)


def _claim(text: str, holds: bool, figures: dict[str, Any]) -> dict[str, Any]:
    return {"claim": text, "holds": bool(holds), **figures}


def _value(estimate: Estimate) -> float:
    return float("nan") if estimate.value is None else estimate.value


def _low(estimate: Estimate) -> float:
    return float("nan") if estimate.low is None else estimate.low


def _high(estimate: Estimate) -> float:
    return float("nan") if estimate.high is None else estimate.high
