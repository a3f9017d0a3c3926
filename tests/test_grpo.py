"""GRPO's loss and rollouts: the ratio is 1 under the mask in force and under no other; clipping, KL
and sums are what they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import forking_lm
from grpo_kit import forgetful_lm, trainee_of, write_problems

from stretto import LM
from stretto.data.rows import Reject
from stretto.errors import InvalidInput
from stretto.eval.tasks import Item, Source
from stretto.train.batches import Batch
from stretto.train.examples import IGNORE, Example
from stretto.train.grpo import LossSettings, PolicyBatch, PolicyExample, k3, policy_loss
from stretto.train.grpo_advantages import Advantage, RewardSettings
from stretto.train.grpo_policy import PolicyRuntime
from stretto.train.grpo_problems import Problems, load_problems
from stretto.train.grpo_rollouts import Roller, Rollout, old_logprobs
from stretto.train.grpo_steps import GrpoSteps, StepSettings, Weights
from stretto.train.logprobs import token_logprobs
from stretto.train.targets import CLASSES
from stretto.train.trainee import Trainee

LOSS = LossSettings(max_tokens=60)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def roller_of(trainee: Trainee, folder: Path, engine: str = "hf", **options: Any) -> Roller:
    source = Source(paths=(write_problems(folder / "problems.jsonl", 4),))
    return Roller(
        policy=PolicyRuntime(trainee, engine=engine, pool_slots=4096),
        problems=load_problems("exact", source),
        folder=folder / "rollouts",
        max_tokens=60,
        requests=8,
        seed=1,
        reject=lambda row: pytest.fail(str(row)),
        **options,
    )


def rollouts_of(trainee: Trainee, folder: Path, engine: str = "hf") -> list[tuple[Item, Rollout]]:
    roller = roller_of(trainee, folder, engine)
    items = roller.problems.items
    groups = roller.draw(1, items, 4).groups
    return [(item, row) for item, group in zip(items, groups, strict=True) for row in group]


def examples_of(
    trainee: Trainee, rows: list[tuple[Item, Rollout]], advantage: Advantage | None = None
) -> list[PolicyExample]:
    maker = trainee.maker()
    made = []
    for item, row in rows:
        example = maker.from_answer(trainee.encode_prompt(item.prompt), row)
        old = old_logprobs(example, row)
        made.append(PolicyExample(example, old, advantage or Advantage(1.0, 0.0)))
    return made


@pytest.fixture(scope="module")
def trainee() -> Trainee:
    return trainee_of(forgetful_lm())


@pytest.fixture(scope="module")
def rows(trainee: Trainee, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Item, Rollout]]:
    return rollouts_of(trainee, tmp_path_factory.mktemp("rows"))


# -- the ratio -------------------------------------------------------------------------------------


def gaps(trainee: Trainee, examples: list[PolicyExample]) -> torch.Tensor:
    batch = PolicyBatch.of(examples)
    with torch.no_grad():
        return (token_logprobs(trainee.model, batch.batch) - batch.old).exp() - 1


def test_the_ratio_is_one_before_the_first_update(
    trainee: Trainee, rows: list[tuple[Item, Rollout]]
) -> None:
    examples = examples_of(trainee, rows)
    assert gaps(trainee, examples).abs().max() < 1e-3
    assert sum(len(row.ends) for _, row in rows) >= 3  # ends are learnt, with log-probs of theirs
    assert {row.finish_reason for _, row in rows} == {"stop", "length"}


def test_under_a_dense_mask_it_is_not(trainee: Trainee, rows: list[tuple[Item, Rollout]]) -> None:
    """The rollouts really forget: log-probs that see what was dropped are others."""
    examples = examples_of(trainee, rows)
    assert any(evicts(e.example) for e in examples)
    seen = [replace(e, example=dense(e.example)) for e in examples]
    assert gaps(trainee, seen).abs().max() > 1e-2
    without = [e for e in examples if not evicts(e.example)]
    assert gaps(trainee, without).abs().max() < 1e-3


def evicts(example: Example) -> bool:
    num = len(example.is_block)
    return bool((example.sees != torch.ones(num, num).bool().tril(-1)).any())


def dense(example: Example) -> Example:
    num = len(example.is_block)
    return replace(example, sees=torch.ones(num, num).bool().tril(-1))


@pytest.mark.parametrize("how", ["full", "lora"])
@pytest.mark.parametrize("engine", ["hf", "fused"])
def test_weights_in_training_are_those_that_answer(how: str, engine: str, tmp_path: Path) -> None:
    """After the weights have changed, without any file of them."""
    trainee = trainee_of(forgetful_lm(head_dim=16), how)
    roller = roller_of(trainee, tmp_path, engine)
    items = roller.problems.items[:2]
    for step in (1, 2):
        pairs = [(i, r) for i, g in zip(items, roller.draw(step, items, 2).groups, strict=True)
                 for r in g]  # fmt: skip
        assert gaps(trainee, examples_of(trainee, pairs)).abs().max() < 1e-3
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in trainee.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    assert gaps(trainee, examples_of(trainee, pairs)).abs().max() > 1e-2


@pytest.mark.parametrize("dialect", ["plain", "pasta", "pasta+tip", "tip with grace"])
def test_other_dialects_have_the_same_promise(dialect: str, tmp_path: Path) -> None:
    lm: LM = (
        forking_lm()
        if dialect == "pasta"
        else forgetful_lm(dialect=dialect.removesuffix(" with grace"))
    )
    if "grace" in dialect:
        card = lm.card.model_copy(update={"grace": True})
        lm = LM.wrap(lm.model, lm.tokenizer, card=card)
    trainee = trainee_of(lm)
    roller = roller_of(trainee, tmp_path)
    items = roller.problems.items
    pairs = [(i, r) for i, g in zip(items, roller.draw(1, items, 4).groups, strict=True) for r in g]
    usable = [pair for pair in pairs if pair[1].finish_reason == "stop"]
    assert usable
    if dialect == "pasta":
        assert any("i" in row.origins for _, row in usable)
    assert gaps(trainee, examples_of(trainee, usable)).abs().max() < 1e-3


# -- the loss --------------------------------------------------------------------------------------


def shifted(examples: list[PolicyExample], by: float) -> list[PolicyExample]:
    """As if the policy had become exp(by) times as fond of every token."""
    return [replace(e, old=e.old - by) for e in examples]


def test_its_gradient_is_that_of_policy_gradients_where_nothing_is_clipped(
    trainee: Trainee, rows: list[tuple[Item, Rollout]]
) -> None:
    examples = examples_of(trainee, rows[:4], Advantage(0.5, 0.25))
    batch = PolicyBatch.of(examples)
    found = policy_loss(trainee.model, batch, LOSS)
    assert found.num_terms == len(batch.old)
    assert float(found.loss.detach()) == pytest.approx(-0.75 * len(batch.old), rel=1e-4)
    assert found.metrics["clipped"][0] == 0
    found.loss.backward()  # type: ignore[no-untyped-call]
    own = {n: p.grad.clone() for n, p in trainee.model.named_parameters() if p.grad is not None}
    trainee.model.zero_grad()
    (-0.75 * token_logprobs(trainee.model, batch.batch).sum()).backward()
    for name, parameter in trainee.model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(own[name], parameter.grad, rtol=1e-3, atol=1e-3), name
    trainee.model.zero_grad()


@pytest.mark.parametrize("case", [
    (0.5, 1.0, 1.3, True), (0.5, -1.0, 1.6487, False), (-0.5, -1.0, 0.9, True),
    (-0.5, 1.0, 0.6065, False), (0.05, 1.0, 1.0513, False),
])  # fmt: skip
def test_ratios_are_clipped_where_they_have_gone_far_enough(
    trainee: Trainee, rows: list[tuple[Item, Rollout]], case: tuple[float, float, float, bool]
) -> None:
    by, advantage, ratio, is_clipped = case
    settings = LossSettings(max_tokens=60, clip_low=0.1, clip_high=0.3)
    examples = shifted(examples_of(trainee, rows[:2], Advantage(advantage, 0.0)), by)
    found = policy_loss(trainee.model, PolicyBatch.of(examples), settings)
    count = found.num_terms
    assert float(found.loss.detach()) / count == pytest.approx(-advantage * ratio, rel=1e-3)
    assert found.metrics["clipped"] == (count if is_clipped else 0, count)
    trainee.model.zero_grad()
    found.loss.backward()  # type: ignore[no-untyped-call]
    moved = max(float(p.grad.abs().max()) for p in trainee.model.parameters())
    assert (moved == 0) == is_clipped
    trainee.model.zero_grad()


def test_answers_add_up_by_tokens_by_their_means_or_by_a_constant(
    trainee: Trainee, rows: list[tuple[Item, Rollout]]
) -> None:
    examples = examples_of(trainee, rows[:3])
    lengths = [len(e.old) for e in examples]
    assert len(set(lengths)) > 1
    batch = PolicyBatch.of(examples)
    wanted = {
        "dapo": (-sum(lengths), sum(lengths)), "grpo": (-3, 3), "dr_grpo": (-sum(lengths) / 60, 3),
    }  # fmt: skip
    for name, (loss, terms) in wanted.items():
        found = policy_loss(trainee.model, batch, replace(LOSS, aggregation=name))  # type: ignore[arg-type]
        assert float(found.loss.detach()) == pytest.approx(loss, rel=1e-3)
        assert found.num_terms == terms


def test_kv_can_be_laid_on_annotations_alone(
    trainee: Trainee, rows: list[tuple[Item, Rollout]]
) -> None:
    batch = PolicyBatch.of(examples_of(trainee, rows, Advantage(0.5, 2.0)))
    everywhere = batch.advantage(LOSS)
    assert everywhere.tolist() == [2.5] * len(batch.old)
    own = batch.advantage(replace(LOSS, kv_tokens="control"))
    is_register = batch.batch.classes == CLASSES.index("register")
    assert 0 < int(is_register.sum()) < len(own)
    assert own[is_register].unique().tolist() == [2.5]
    assert own[~is_register].unique().tolist() == [0.5]


def test_divergence_from_the_start_pulls_back(
    trainee: Trainee, rows: list[tuple[Item, Rollout]]
) -> None:
    ours, theirs = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0])
    assert k3(ours, theirs).tolist() == pytest.approx([0.0, 2.718281828 - 2])
    examples = examples_of(trainee, rows[:2], Advantage(0.0, 0.0))
    near = [replace(e, reference=e.old) for e in examples]
    far = [replace(e, reference=e.old - 1) for e in examples]
    settings = replace(LOSS, beta=0.5)
    found = [policy_loss(trainee.model, PolicyBatch.of(e), settings) for e in (near, far)]
    count = found[0].num_terms
    assert found[0].loss.item() == pytest.approx(0, abs=1e-3)
    assert found[1].loss.item() / count == pytest.approx(0.5 * 0.36788, rel=1e-3)
    assert found[1].metrics["kl"][0] / count == pytest.approx(0.36788, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_low": 1.0}, "ratios are clipped to 1 - 1.0"),
        ({"clip_high": float("inf")}, "1 [+] inf"),
        ({"beta": -1.0}, "beta is -1.0"),
        ({"aggregation": "mean"}, "aggregation is 'mean'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        LossSettings(max_tokens=1, **settings)


# -- rollouts and steps ----------------------------------------------------------------------------


def test_an_answer_that_was_cut_is_wrong(rows: list[tuple[Item, Rollout]]) -> None:
    """Whatever number it had come to."""
    assert {row.score for _, row in rows if row.is_cut} == {0.0}
    assert {row.score for _, row in rows if not row.is_cut} == {0.0, 1.0}
    for _, row in rows:
        assert (row.figures.num_tokens, row.figures.is_right) == (len(row.ids), row.score == 1)
        assert min(1, len(row.ids)) <= row.live_mean <= (len(row.ids) + 1) / 2


def test_what_is_in_the_file_is_not_drawn_again(trainee: Trainee, tmp_path: Path) -> None:
    roller = roller_of(trainee, tmp_path)
    items = roller.problems.items[:2]
    first = roller.draw(3, items, 3)
    path = tmp_path / "rollouts" / "step-00000003.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][:20])  # a kill
    again = roller.draw(3, items, 3)
    assert 0 < again.num_tokens < first.num_tokens
    assert path.read_bytes().startswith(b"".join(lines[:4]))
    ids = [[row.ids for row in group] for group in again.groups]
    assert ids == [[row.ids for row in group] for group in first.groups]
    nothing = roller.draw(3, items, 3)
    assert nothing.num_tokens == 0
    assert nothing.groups == again.groups
    other = roller.draw(4, items, 3)
    assert [[r.ids for r in g] for g in other.groups] != ids  # no two steps draw the same numbers


def test_a_problem_that_cannot_be_answered_is_told(trainee: Trainee, tmp_path: Path) -> None:
    told: list[Reject] = []
    roller = roller_of(trainee, tmp_path)
    long = Item("long " * 3000, "7")
    roller.problems = Problems((long, *roller.problems.items), roller.problems.score, "", {})
    roller.reject = told.append
    drawn = roller.draw(1, roller.problems.items[:2], 2)
    assert [len(group) for group in drawn.groups] == [0, 2]
    assert {row.prompt_id for row in told} == {long.prompt_id}


def steps_of(trainee: Trainee, folder: Path, **settings: Any) -> GrpoSteps:
    loss = replace(LOSS, beta=settings.pop("beta", 0.0))
    weight = settings.pop("weight", 0.5)
    settings = {"prompts": 3, "samples": 4, **settings}
    return GrpoSteps(
        trainee.model, trainee.maker(), trainee.encode_prompt, roller=roller_of(trainee, folder),
        settings=StepSettings(num_steps=3, pack_tokens=200, **settings),
        rewards=RewardSettings(weight=weight), loss=loss,
    )  # fmt: skip


def test_each_time_through_problems_come_once(trainee: Trainee, tmp_path: Path) -> None:
    """Three of four a step: one is left over, and another time it is another one."""
    steps = steps_of(trainee, tmp_path)
    chosen = [[item.prompt for item in steps.problems_of(k)] for k in range(8)]
    assert all(len(set(own)) == 3 for own in chosen)
    assert len({frozenset(own) for own in chosen}) > 1
    assert chosen == [[item.prompt for item in steps.problems_of(k)] for k in range(8)]
    all_at_once = steps_of(trainee, tmp_path, prompts=9)
    assert len(all_at_once.problems_of(5)) == 4


def test_what_teaches_nothing_is_left_out_and_still_counted(
    trainee: Trainee, tmp_path: Path
) -> None:
    """The loss of a step is that of all its rollouts together."""
    steps = steps_of(trainee, tmp_path, weight=0.0, samples=2)
    packs = steps.packs(0)
    opened = steps._open
    assert opened is not None
    kept = {number for pack in packs for number in pack}
    silent = [n for n, r in enumerate(opened.rollouts) if r.advantage.is_nothing]
    assert silent
    assert kept == set(range(len(opened.rollouts))) - set(silent)
    terms = loss = 0.0
    with torch.no_grad():
        for pack in packs:
            outcome = steps.outcome(trainee.model, steps.batch(pack))
            terms, loss = terms + outcome.num_terms, loss + float(outcome.loss)
        whole = policy_loss(trainee.model, PolicyBatch.of(opened.rollouts), LOSS)
    assert terms == pytest.approx(whole.num_terms)
    assert loss == pytest.approx(float(whole.loss), rel=1e-3, abs=1e-3)


def test_minibatches_share_out_all_rollouts_each_time_through(
    trainee: Trainee, tmp_path: Path
) -> None:
    steps = steps_of(trainee, tmp_path, inner=2, minibatches=3, beta=0.1)
    assert steps.num_steps == 3 * 6
    parts = [[n for pack in steps.packs(update) for n in pack] for update in range(6)]
    opened = steps._open
    assert opened is not None
    everything = list(range(len(opened.rollouts)))
    for through in (parts[:3], parts[3:]):
        assert sorted(n for part in through for n in part) == everything
    assert parts[:3] != parts[3:]
    assert all(r.reference is not None for r in opened.rollouts)
    for rollout in opened.rollouts:
        assert torch.allclose(rollout.reference, rollout.old, atol=1e-3)  # type: ignore[arg-type]


def test_weights_are_put_in_force_and_taken_back(trainee: Trainee) -> None:
    parameter = next(p for p in trainee.model.parameters() if p.requires_grad)
    start, own = Weights(trainee.model), parameter.detach().clone()
    with torch.no_grad():
        parameter += 1
    place = parameter.data_ptr()
    with start.in_force():
        assert torch.equal(parameter, own)
    assert parameter.data_ptr() == place
    assert torch.equal(parameter, own + 1)
    with torch.no_grad():
        parameter.copy_(own)


def test_targets_know_the_tokens_that_they_are(
    trainee: Trainee, rows: list[tuple[Item, Rollout]]
) -> None:
    for made in examples_of(trainee, rows):
        example = made.example
        rows_ = (example.targets != IGNORE).nonzero()[:, 0]
        follows = example.follows[rows_]
        tokens = follows >= 0
        assert torch.equal(example.ids[follows[tokens]], example.targets[rows_][tokens])
        assert int((~tokens).sum()) <= 1
    assert Batch.of([e.example for e in examples_of(trainee, rows[:2])]).num_examples == 2
