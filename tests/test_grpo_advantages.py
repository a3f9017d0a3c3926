"""Rewards and advantages of GRPO: KV counts, neither cancelled by scaling nor had by a trick."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.dialects import get_dialect
from stretto.dialects.words import WordsVocabulary
from stretto.errors import InvalidInput
from stretto.tokens import ModelCard
from stretto.trace import live_tokens
from stretto.train.grpo_advantages import (
    Advantage,
    Figures,
    RewardSettings,
    advantages,
    kv_of,
    rewards_of,
)

DENSE = Figures(score=1.0, num_tokens=100, num_text=100, live_mean=50.5)
WRONG = Figures(score=0.0, num_tokens=100, num_text=100, live_mean=10.0)


def right(live: float, tokens: int = 100) -> Figures:
    return Figures(1.0, tokens, tokens, live)


def totals(group: Sequence[Figures], **settings: Any) -> list[float]:
    (found,) = advantages([group], RewardSettings(**settings))
    return [a.score + a.kv for a in found]


groups = st.lists(
    st.lists(
        st.builds(
            Figures,
            score=st.sampled_from([0.0, 1.0]),
            num_tokens=st.just(60),
            num_text=st.integers(1, 60),
            live_mean=st.floats(1, 30),
        ),
        min_size=2,
        max_size=6,
    ),
    min_size=1,
    max_size=4,
)


# -- scaling ---------------------------------------------------------------------------------------


@given(groups=groups)
def test_without_weight_advantages_are_those_of_grpo(groups: list[list[Figures]]) -> None:
    for form in ("separate", "r1", "r2", "r3"):
        found = advantages(groups, RewardSettings(form=form, scale="group"))  # type: ignore[arg-type]
        for group, own in zip(groups, found, strict=True):
            scores = [f.score for f in group]
            mean, std = statistics.mean(scores), statistics.stdev(scores)
            assert [a.score for a in own] == pytest.approx(
                [(score - mean) / (std + 1e-4) for score in scores], abs=1e-9
            )
            assert all(a.kv == 0 for a in own)


def test_group_scaling_cancels_the_weight_of_a_summed_reward() -> None:
    """The trap that the default avoids: it is refused where it would be stepped into."""
    group = [right(20), right(30), right(40)]

    def scaled(weight: float) -> list[float]:
        rewards = [s - p for s, p in rewards_of(group, RewardSettings(weight, "r2"))]
        mean, std = statistics.mean(rewards), statistics.stdev(rewards)
        return [(reward - mean) / std for reward in rewards]

    assert scaled(0.01) == pytest.approx(scaled(1.0))
    for form in ("r1", "r2", "r3"):
        with pytest.raises(InvalidInput, match="the weight of KV cancels"):
            RewardSettings(0.1, form, scale="group")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "scale"),
    [*itertools.product(["separate"], ["none", "group", "batch"]),
     *itertools.product(["r1", "r2", "r3"], ["none"])],
)  # fmt: skip
def test_a_solved_group_is_linear_in_the_weight(form: str, scale: str) -> None:
    group = [right(20), right(30), right(40)]
    once = totals(group, weight=0.1, form=form, scale=scale)
    assert once[0] > once[1] > once[2]
    assert totals(group, weight=0.4, form=form, scale=scale) == pytest.approx(
        [4 * value for value in once]
    )


def test_batch_scaling_is_about_the_groups_means() -> None:
    two = [[right(20), right(40)], [right(70), right(90)]]  # a hard prompt and an easy one
    found = advantages(two, RewardSettings(weight=1.0))
    assert [a.kv for a in found[0]] == pytest.approx([a.kv for a in found[1]])
    assert found[0][0].kv == pytest.approx(1.0, abs=1e-2)


# -- the gate --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["separate", "r1", "r2", "r3"])
def test_an_unsolved_group_gets_nothing_for_small_kv(form: str) -> None:
    group = [Figures(0.0, 100, 100, live) for live in (5.0, 20.0, 50.0)]
    (found,) = advantages([group], RewardSettings(weight=1.0, form=form, scale="none"))  # type: ignore[arg-type]
    assert found == [Advantage(0.0, 0.0)] * 3


def test_right_answers_are_compared_with_right_ones_alone() -> None:
    group = [right(20), right(40), WRONG, WRONG]
    (found,) = advantages([group], RewardSettings(weight=0.5, scale="none"))
    assert [a.kv for a in found[2:]] == [0.0, 0.0]
    assert found[0].kv == pytest.approx(-found[1].kv)
    assert found[0].kv > 0
    assert min(a.score for a in found[:2]) > max(a.score for a in found[2:])
    (alone,) = advantages([[right(90), WRONG]], RewardSettings(weight=0.5))
    assert alone[0].kv == 0


@given(groups=groups, weight=st.floats(0, 1))
def test_what_is_gated_keeps_every_right_answer_above_every_wrong_one(
    groups: list[list[Figures]], weight: float
) -> None:
    rewards = [rewards_of(group, RewardSettings(weight, "r2", measure="same")) for group in groups]
    for group, own in zip(groups, rewards, strict=True):
        for figures, (score, penalty) in zip(group, own, strict=True):
            if not figures.is_right:
                assert penalty == 0
            elif figures.live_mean <= (figures.num_tokens + 1) / 2:
                assert score - penalty >= 0


# -- measures --------------------------------------------------------------------------------------


def test_measures_are_what_they_say() -> None:
    group = [DENSE, right(25.25)]
    assert kv_of(group, RewardSettings()) == pytest.approx([1.0, 0.5])
    assert kv_of(group, RewardSettings(measure="same")) == pytest.approx([1.0, 0.5])
    assert kv_of(group, RewardSettings(measure=101)) == pytest.approx([0.5, 0.25])
    free = RewardSettings(weight=1.0, form="r1", free=0.6, scale="none")
    assert [p for _, p in rewards_of(group, free)] == pytest.approx([0.4, 0.0])


# -- tricks ----------------------------------------------------------------------------------------
# Texts of a real dialect, through its parser: what the runtime would have measured.

STEP = "the value of this step follows from what was said before "
HONEST = "".join(f"<reg_{k % 3}>{STEP}{k} " for k in range(8)) + "so 7"


def figures_of(text: str) -> Figures:
    dialect, vocabulary = get_dialect("tip"), WordsVocabulary(get_dialect("tip").control_forms)
    settings = ModelCard.model_construct(dialect="tip")
    parsed = dialect.parse_text(text, vocabulary, Settings(settings), "what is it?")
    live = live_tokens(parsed.trace)
    return Figures(1.0, parsed.trace.num_tokens, parsed.trace.num_text_tokens, live.generated_mean)


class Settings:
    """A card without a model's positions."""

    max_positions = None

    def __init__(self, card: ModelCard) -> None:
        self._card = card

    def __getattr__(self, name: str) -> Any:
        return getattr(self._card, name)


def dense() -> str:
    """The same text without registers: all of it is before the first one."""
    import re

    return re.sub(r"<reg_\d>", "", HONEST)


def spam() -> str:
    """Registers that hold a word each, or nothing, after every step."""
    steps = HONEST.split("<reg_")[1:]
    return "".join(f"<reg_{step}" + "<reg_5><reg_6>" * 6 for step in steps)


def restating() -> str:
    """Each step says all again in one register, so that nothing else need be kept."""
    return "".join(f"<reg_0>{STEP * 3}{k} " for k in range(12)) + "so 7"


def short() -> str:
    """An answer that says less and forgets nothing."""
    return STEP * 2 + "so 7"


def best_of(*tricks: Figures, **settings: Any) -> int:
    """The rollout with the highest advantage, in a group of honest ones and tricks."""
    group = [*[figures_of(HONEST)] * 3, *tricks]
    own = totals(group, weight=1.0, **settings)
    return max(range(len(own)), key=lambda k: own[k])


@pytest.mark.parametrize("trick", [dense, spam, restating, short], ids=lambda f: f.__name__)
def test_no_trick_beats_an_honest_answer(trick: Any) -> None:
    honest, other = figures_of(HONEST), figures_of(trick())
    own = totals([honest, honest, honest, other], weight=1.0)
    assert own[3] < min(own[:3])


def test_what_is_before_the_first_register_is_counted() -> None:
    assert kv_of([figures_of(dense())], RewardSettings()) == [1.0]
    assert kv_of([figures_of(HONEST)], RewardSettings())[0] < 0.7


def test_the_other_measures_can_be_had_by_length_alone() -> None:
    """Why they are not the default."""
    assert best_of(figures_of(spam()), measure="same") == 3
    assert best_of(figures_of(restating()), measure="same") == 3
    assert best_of(figures_of(short()), measure=100) == 3


def test_a_word_more_or_less_within_the_usual_length_buys_nothing() -> None:
    """Dense answers of any length up to the usual one hold what dense ones hold."""
    group = [Figures(1.0, n, n, (n + 1) / 2) for n in (50, 80, 100, 100, 100)]
    assert kv_of(group, RewardSettings()) == pytest.approx([1.0] * 5)
    longer = Figures(1.0, 120, 120, 60.5)
    assert kv_of([*group, longer], RewardSettings(length=100))[-1] > 1.4


def test_a_usual_length_can_be_fixed_so_that_a_whole_group_cannot_drift() -> None:
    restated = [figures_of(restating())] * 4
    usual = figures_of(HONEST).num_text
    assert kv_of(restated, RewardSettings())[0] < 0.3
    assert kv_of(restated, RewardSettings(length=usual))[0] >= 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "r4"}, "reward is 'r4'"),
        ({"scale": "all"}, "scale is 'all'"),
        ({"measure": "peak"}, "kv_measure is 'peak'"),
        ({"measure": 0}, "kv_measure is 0"),
        ({"weight": -1.0}, "kv_weight is -1.0"),
        ({"free": float("nan")}, "kv_free is nan"),
        ({"length": 0}, "kv_length is 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        RewardSettings(**settings)
