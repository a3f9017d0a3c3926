"""Rounds of preference training: each stage's file is made if it is not there, then read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli import train_judge
from stretto.cli import train_score as parts
from stretto.cli.output import say
from stretto.cli.train_parts import is_first
from stretto.cli.train_plan import Plan, check, open_folder
from stretto.cli.train_sampler import card_of, control_of, folder_of
from stretto.errors import INTERRUPTED, SOME_FAILED
from stretto.files import beside

if TYPE_CHECKING:
    from stretto.data.rows import Answer, PromptBook
    from stretto.train.pairs import Pair
    from stretto.train.prefer_run import Learner, Trained
    from stretto.train.trainee import Trainee


class Stopped(Exception):
    """A stage ended before its work was done. `code`: the exit status."""

    def __init__(self, code: int, stage: str) -> None:
        super().__init__(stage)
        self.code = code


def run_rounds(plan: Plan) -> tuple[int, dict[str, Any]]:
    """Runs what is not done yet; exit status and summary."""
    from stretto.train.saved import is_saved

    check(plan)
    open_folder(plan)
    results: list[dict[str, Any]] = []
    code = 0
    try:
        for number in range(1, plan.rounds + 1):
            if is_saved(plan.model(number)):
                results.append({"round": number, "model": str(plan.model(number)), "done": True})
                continue
            results.append({"round": number, "model": str(plan.model(number))})
            _run_round(plan, number, results[-1])
    except Stopped as stop:
        code = stop.code
        results[-1]["stopped_at"] = str(stop)
        if is_first():
            say(f"stopped at {stop} of round {len(results)}; the same command goes on")
    last = results[-1]["model"] if code == 0 else None
    if code == 0 and any(map(_has_left_out, results)):
        code = SOME_FAILED
        if is_first():
            say("prompts or pairs were left out; the counts of each stage say how many")
    return code, {"rounds": results, "model": last}


def _has_left_out(result: Mapping[str, Any]) -> bool:
    """Whether a round could not use something that it should have: prompts that cannot be answered
    or that the baseline did not answer, or whose answers have no quality, pairs that cannot be
    learnt from."""
    losses = (
        ("sampling", "rejected"), ("scoring", "no_baseline"), ("scoring", "unrated"),
        ("training", "unusable_pairs"),
    )  # fmt: skip
    return any(result.get(stage, {}).get(name) for stage, name in losses)


def _run_round(plan: Plan, number: int, result: dict[str, Any]) -> None:
    from stretto.data.rows import PromptBook

    plan.folder(number).mkdir(parents=True, exist_ok=True)
    book = PromptBook.read(plan.prompts, prompt_field=plan.prompt_field)
    files = _answers(plan, number, result)
    answers = parts.read_answers(files)
    sampled = Sampled(answers, control_of(answers, files, plan.start_of(number)))
    pairs = _pairs(plan, number, sampled, book, result)
    result["training"] = _train(plan, number, answers, pairs, book).to_json()


# -- sampling --------------------------------------------------------------------------------------


def _answers(plan: Plan, number: int, result: dict[str, Any]) -> tuple[Path, ...]:
    if number == 1 and plan.given[0]:
        return plan.given[0]
    from stretto.cli.answer import load
    from stretto.cli.data_sample import Job, run_job
    from stretto.data.rows import read_sources
    from stretto.data.select import select
    from stretto.params import SamplingParams

    chosen, how = plan.selection, plan.sampling
    sources = read_sources(plan.prompts, prompt_field=plan.prompt_field, keep_fields=chosen.skip_if)
    texts = [source.prompt for source in select(sources, chosen)[0]]
    path = plan.folder(number) / "answers.jsonl"
    params = SamplingParams(max_tokens=how.max_tokens, temperature=1.0, seed=plan.seed_of(number))
    start = plan.start_of(number)
    lm = load(
        start, dtype=how.dtype, device=plan.device, engine=how.engine, threads=None,
        pool_slots=how.pool_slots, page_size=1, offline=False, quiet=plan.quiet,
    )  # fmt: skip
    job = Job(
        path, params, "auto", how.dtype, start, how.n, how.requests, how.keeps_prompts, True,
        plan.quiet,
    )  # fmt: skip
    code, result["sampling"] = run_job(lm, texts, job)
    if code == INTERRUPTED:
        raise Stopped(code, "sampling")
    return (path,)


# -- scoring and pairing ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampled:
    """A round's answers, and the control ids of the model that gave them."""

    answers: list[Answer]
    control: dict[str, int]


def _pairs(
    plan: Plan, number: int, sampled: Sampled, book: PromptBook, result: dict[str, Any]
) -> list[Pair]:
    from stretto.data.rows import read_rows
    from stretto.train.pairs import Pair, Scored, summarise

    if number == 1 and plan.given[2] is not None:
        return read_rows(plan.given[2], Pair)
    given = plan.given[1] if number == 1 else None
    rows = (
        _scored(plan, number, sampled, book, result) if given is None else read_rows(given, Scored)
    )
    path = plan.folder(number) / "pairs.jsonl"
    made = parts.write_pairs(
        rows, path, lam=plan.lam, variant=plan.variant, length_ratio=plan.length_ratio
    )
    result["pairs"] = summarise(made, rows)
    return made


def _scored(
    plan: Plan, number: int, sampled: Sampled, book: PromptBook, result: dict[str, Any]
) -> list[Any]:
    if plan.baseline is None:
        raise AssertionError("checked before")
    path = plan.folder(number) / "scored.jsonl"
    settings = plan.judge
    if settings is not None:
        settings = replace(settings, replies=beside(path, "replies.jsonl"))
    references = plan.held_against.read()
    inputs = parts.Inputs.of(
        sampled.answers, plan.baseline, book, references=references, control=sampled.control
    )
    scoring, code = parts.run_scoring(inputs, settings, path, quiet=plan.quiet)
    result["scoring"] = scoring.to_json()
    train_judge.say_unrated(scoring)
    if code or scoring.unjudged:
        raise Stopped(code or SOME_FAILED, "scoring")
    return scoring.rows


# -- training --------------------------------------------------------------------------------------


def _train(
    plan: Plan, number: int, answers: list[Answer], pairs: list[Pair], book: PromptBook
) -> Trained:
    from stretto.cli.data_progress import Progress
    from stretto.cli.output import interruptible
    from stretto.train.prefer_run import Hooks, train_on_pairs
    from stretto.train.workers import joined

    with joined(plan.device) as workers, interruptible() as is_interrupted:
        trainee = _open(plan, number)
        with Progress(quiet=plan.quiet or not workers.is_first) as progress:
            hooks = Hooks(
                report=lambda line: progress.step(_worded(number, line)),
                report_reference=lambda done, all_: progress.update(f"reference {done}/{all_}"),
                should_stop=is_interrupted,
            )
            learner = _learner(plan, number, trainee, book, workers)
            folder = plan.folder(number) / "training"
            trained = train_on_pairs(learner, pairs, answers, folder, plan.settings, hooks=hooks)
        if not trained.finished.is_complete:
            raise Stopped(INTERRUPTED, "training")
        if workers.is_first:
            save_model(trainee, plan.model(number), judges_before(plan.start_of(number)), pairs)
        workers.wait()
        return trained


def _open(plan: Plan, number: int) -> Trainee:
    from stretto.train.trainee import open_trainee

    dialect = card_of(plan.start_of(number)).dialect
    return open_trainee(
        plan.start_of(number),
        dialect=dialect,
        how="full" if plan.lora is None else "lora",
        lora=plan.lora,
        dtype=plan.dtype,
        device=plan.device,
        seed=plan.settings.seed,
    )


def _learner(plan: Plan, number: int, trainee: Trainee, book: PromptBook, workers: Any) -> Learner:
    from stretto.models.fingerprint import fingerprint
    from stretto.train.prefer_run import Learner

    identity = {
        "model": fingerprint(folder_of(plan.start_of(number))),
        "dtype": plan.dtype,
        "how": trainee.how,
    }
    return Learner(
        trainee.model,
        trainee.maker(),
        lambda answer: trainee.encode_prompt(book.prompt_of(answer)),
        identity,
        workers,
    )


def _worded(number: int, line: Mapping[str, Any]) -> str:
    return (
        f"round {number}, step {line['step']}/{line.get('of', '-')}: loss {line['loss']:.4g}, "
        f"gap {line.get('gap', 0.0):.3g}, right {line.get('accuracy', 0.0):.0%}"
    )


def judges_before(start: str) -> list[str]:
    """Who scored what the start model learnt from."""
    from stretto.eval.judges import judges_of

    return judges_of(folder_of(start))


def save_model(trainee: Trainee, folder: Path, before: list[str], pairs: list[Pair]) -> None:
    """Writes the model with the names of all its judges, whole or not at all."""
    from stretto.train.prefer_run import write_preference

    trainee.save(folder, lambda place: write_preference(place, before=before, pairs=pairs))
