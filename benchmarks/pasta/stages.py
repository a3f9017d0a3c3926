"""The stages of the PASTA experiment: which commands, how large, and what is kept of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stretto.bench.stages import Command, Stage

PROMPTS = ("--prompts", "prompts/prompts.jsonl")
ANNOTATORS = ("likelihood", "structure", "apar")
TRAIN, PREFER = "0-80", "80-100"
"""Percents of prompt hashes: what supervised training sees, and what preference training sees."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything. `minutes` scales the estimates, which are of two CPU cores."""

    prompts: int
    rows: int
    epochs: float
    candidates: int
    prefer_prompts: int
    prefer_epochs: float
    lambdas: tuple[str, ...]
    rounds: int
    eval_prompts: int
    multipart: int
    penalties: tuple[str, ...] = ("1", "1.05", "1.1", "1.15", "1.2", "1.3")
    max_tokens: int = 320
    eval_tokens: int = 640
    minutes: float = 1.0


NORMAL = Sizes(2000, 975, 2, 8, 160, 1, ("0", "0.25", "1", "4", "inf"), 2, 100, 500)
FULL = Sizes(
    2900, 2000, 2, 10, 600, 1, ("0", "0.25", "1", "2", "4", "8", "inf"), 3, 400, 1500, minutes=4
)
QUICK = Sizes(40, 30, 1, 4, 8, 1, ("4",), 1, 3, 8, max_tokens=400, eval_tokens=224, minutes=0.01)


def stages_of(sizes: Sizes) -> list[Stage]:
    """All stages, in an order in which each finds what it reads."""
    return [
        _prompts(),
        _distill(sizes),
        _points(sizes),
        _tidy(),
        *(_annotate(sizes, name) for name in ANNOTATORS),
        _mix(sizes),
        *_supervised(sizes, "sft-pasta", "sft-baseline"),
        *_preference(sizes),
        _validation(sizes),
        *_scores(sizes),
        *_supervised(sizes, "sft-structure", "sft-apar"),
        *_multipart(sizes),
        *_evaluation_multipart(sizes),
        *_evaluation(sizes),
        _penalties(sizes),
        *_evaluation_penalised(sizes),
        _report(sizes),
    ]


def _prompts() -> Stage:
    command = ("python", "prompts.py", "--data", "data/instruct", "--out", PROMPTS[1])
    return Stage("prompts", 1, (command,))


def _distill(sizes: Sizes) -> Stage:
    """The model's own answers, so that training keeps its quality and adds orchestration only."""
    command = (
        "stretto", "data", "sample", *PROMPTS, "--split", TRAIN, "--limit", str(sizes.prompts),
        "--method", "sequential", "--dtype", "int8", "--temperature", "0.5", "--top-p", "0.95",
        "--max-tokens", str(sizes.max_tokens), "--no-prompts", "--no-logprobs",
        "--out", "distill/answers.jsonl",
    )  # fmt: skip
    return Stage("distill", _minutes(sizes, 15), (command,), ("answers.jsonl",))


def _points(sizes: Sizes) -> Stage:
    command = (
        "python", "points.py", "distill/answers.jsonl", *PROMPTS,
        "--max-tokens", str(sizes.max_tokens), "--out", "points/answers.jsonl",
    )  # fmt: skip
    return Stage("points", _minutes(sizes, 10), (command,), ("answers.jsonl",))


def _tidy() -> Stage:
    command = (
        "python", "tidy.py", "distill/answers.jsonl", "--points", "points/answers.jsonl", *PROMPTS,
        "--out", "tidy/answers.jsonl",
    )  # fmt: skip
    return Stage("tidy", 1, (command,))


def _annotate(sizes: Sizes, annotator: str) -> Stage:
    stage = f"annotate-{annotator}"
    command = (
        "stretto", "data", "annotate", "tidy/answers.jsonl", "--annotator", annotator,
        "--no-prompts", "--out", stage,
    )  # fmt: skip
    minutes = _minutes(sizes, 25 if annotator == "likelihood" else 1)
    return Stage(stage, minutes, (command,), ("annotated.jsonl",))


def _mix(sizes: Sizes) -> Stage:
    commands = tuple(
        (
            "python", "mix.py", f"annotate-{annotator}/annotated.jsonl",
            "--rows", str(sizes.rows), "--out", f"mix/{annotator}.jsonl",
        )
        for annotator in ANNOTATORS
    )  # fmt: skip
    return Stage("mix", 1, commands)


SFT = {
    "sft-pasta": ("likelihood", "--dialect", "pasta"),
    "sft-baseline": ("likelihood", "--baseline"),
    "sft-structure": ("structure", "--dialect", "pasta"),
    "sft-apar": ("apar", "--dialect", "apar"),
}


def _supervised(sizes: Sizes, *names: str) -> list[Stage]:
    stages = []
    for name in names:
        annotator, *settings = SFT[name]
        command = (
            "stretto", "train", "sft", "--data", f"mix/{annotator}.jsonl", *PROMPTS,
            *settings, "--lora", "--rank", "4", "--epochs", str(sizes.epochs),
            "--valid-share", "0.05", "--valid-every", "40", "--batch-tokens", "4096",
            "--max-tokens", "512", "--checkpoint-every", "10", "--out", name,
        )  # fmt: skip
        kept = ("model", "metrics.jsonl", "summary.json", "config.json")
        stages.append(Stage(name, _minutes(sizes, 20), (command,), kept))
    return stages


def _preference(sizes: Sizes) -> list[Stage]:
    chosen = (
        *PROMPTS, "--split", PREFER, "--limit", str(sizes.prefer_prompts),
        "--max-tokens", str(sizes.max_tokens),
    )  # fmt: skip
    baseline = (
        "stretto", "data", "sample", "--model", "sft-baseline/model", "--method", "sequential",
        "--temperature", "0", *chosen, "--no-prompts", "--no-logprobs",
        "--out", "baseline-answers/answers.jsonl",
    )  # fmt: skip
    stages = [
        Stage("baseline-answers", _minutes(sizes, 3), (baseline,), ("answers.jsonl",)),
        _candidates("candidates-1", "sft-pasta/model", sizes, chosen),
        *(_prefer(f"bon-{x}", "sft-pasta/model", "candidates-1", x, sizes) for x in sizes.lambdas),
    ]
    model = "bon-4/round-1/model"
    for number in range(2, sizes.rounds + 1):
        samples, name = f"candidates-{number}", f"bon-4-round-{number}"
        stages.append(_candidates(samples, model, sizes, chosen))
        stages.append(_prefer(name, model, samples, "4", sizes))
        model = f"{name}/round-1/model"
    return stages


def _candidates(name: str, model: str, sizes: Sizes, chosen: Command) -> Stage:
    """Answers at temperature 1 and their scores. They are large, so only the scores are kept;
    the pairs that come of them are kept with the answers in them."""
    sample = (
        "stretto", "data", "sample", "--model", model, "--n", str(sizes.candidates),
        "--temperature", "1", *chosen, "--no-prompts", "--out", f"{name}/answers.jsonl",
    )  # fmt: skip
    score = (
        "stretto", "train", "score", "--answers", f"{name}/answers.jsonl", "--model", model,
        "--baseline", "baseline-answers/answers.jsonl", *PROMPTS,
        "--judge", "likelihood:sft-baseline/model", "--out", f"{name}/scored.jsonl",
    )  # fmt: skip
    return Stage(name, _minutes(sizes, 20), (sample, score), ("answers.jsonl", "scored.jsonl"))


def _prefer(
    name: str, model: str, samples: str, weight: str, sizes: Sizes, *, variant: str = "matched"
) -> Stage:
    command = (
        "stretto", "train", "prefer", "--model", model, *PROMPTS, "--no-prompts",
        "--answers", f"{samples}/answers.jsonl", "--scored", f"{samples}/scored.jsonl",
        "--baseline", "baseline-answers/answers.jsonl",
        "--judge", "likelihood:sft-baseline/model",
        "--variant", variant, "--lambda", weight, "--length-ratio", "1.25", "--lr", "1e-4",
        "--epochs", str(sizes.prefer_epochs), "--out", name,
    )  # fmt: skip
    kept = ("round-1/model", "round-1/pairs.jsonl", "round-1/training/metrics.jsonl")
    return Stage(name, _minutes(sizes, 10), (command,), kept)


def _multipart(sizes: Sizes) -> list[Stage]:
    """The checkable task: trained on its own examples, with and without annotations."""
    examples = (
        "stretto", "eval", "examples", "--num", str(sizes.multipart), "--split", "train",
        "--out", "multipart-data/examples.jsonl",
    )  # fmt: skip
    stages = [Stage("multipart-data", 1, (examples,))]
    for name, settings in (
        ("multipart-baseline", ("--baseline",)),
        ("multipart-pasta", ("--dialect", "pasta")),
    ):
        command = (
            "stretto", "train", "sft", "--data", "multipart-data/examples.jsonl", *settings,
            "--lora", "--rank", "4", "--epochs", str(sizes.epochs), "--valid-share", "0.05",
            "--out", name,
        )  # fmt: skip
        kept = ("model", "metrics.jsonl", "summary.json", "config.json")
        stages.append(Stage(name, _minutes(sizes, 20), (command,), kept))
    return stages


def evaluated(sizes: Sizes) -> dict[str, str]:
    """Arms on the instruction prompts, beside the baseline: name to model and method."""
    arms = {
        "sot": "sft-baseline/model:sot",
        "apar": "sft-apar/model",
        "pasta-sft": "sft-pasta/model",
        "pasta-structure": "sft-structure/model",
    }
    for weight in sizes.lambdas:
        arms[f"pasta-bon-{weight}"] = f"bon-{weight}/round-1/model"
    for number in range(2, sizes.rounds + 1):
        arms[f"pasta-bon-4-r{number}"] = f"bon-4-round-{number}/round-1/model"
    return arms


def _validation(sizes: Sizes) -> Stage:
    """What ships is chosen here, by the rule of `ship.py`, on prompts that no table reports."""
    arms = {name: m for name, m in evaluated(sizes).items() if name.startswith("pasta-")}
    del arms["pasta-structure"]
    return _untimed("validation", arms, sizes)


VARIANTS = ("speedup", "parallelism")
"""Scores of speed that are held against `matched`, at a weight at which neither part leads."""


def _scores(sizes: Sizes) -> list[Stage]:
    """What a model learns of another score of speed, the same candidates and judge given."""
    stages, arms = [], {"pasta-sft": "sft-pasta/model"}
    weight = "0.25" if "0.25" in sizes.lambdas else sizes.lambdas[0]
    arms[f"pasta-bon-{weight}"] = f"bon-{weight}/round-1/model"
    for variant in VARIANTS:
        name = f"bon-{weight}-{variant}"
        stages.append(
            _prefer(name, "sft-pasta/model", "candidates-1", weight, sizes, variant=variant)
        )
        arms[f"pasta-{name}"] = f"{name}/round-1/model"
    return [*stages, _untimed("scores", arms, sizes)]


def _untimed(name: str, arms: dict[str, str], sizes: Sizes) -> Stage:
    """Arms on the prompts of Vicuna, judged and compared. Many prompts share each pass."""
    prompts = ("--prompts", VICUNA)
    run = (
        "stretto", "eval", "run", "--task", "instruct", *prompts, "--no-prompts", "--pairs", "0",
        "--limit", str(min(80, sizes.eval_prompts)), "--max-tokens", str(sizes.eval_tokens),
        "--baseline", "sft-baseline/model",
        *(part for arm, model in arms.items() for part in ("--arm", f"{arm}={model}")),
        "--out", name,
    )  # fmt: skip
    folders = tuple(f"{name}/{arm}" for arm in arms)
    references = f"{name}/references.jsonl"
    find = (
        "python", "references.py", "--data", "data/instruct", *prompts, "--out", references,
    )  # fmt: skip
    commands = (
        run, find, *_judge(folders, prompts, references),
        *_compare(folders, f"{name}/compared"),
    )  # fmt: skip
    kept = (*_of_each(arms, *EVAL_FILES), *_of_each(arms, *JUDGED_FILES), *COMPARED)
    return Stage(name, _minutes(sizes, 2 * len(arms)), commands, kept)


JUDGE = "likelihood:smollm2-135m-instruct"
"""The base of all arms, none of which it is."""


def _judge(folders: Command, prompts: Command, *references: str) -> tuple[Command, ...]:
    """By two judges with nothing in common; the summaries that stay are of the last."""
    judge = ("stretto", "eval", "judge", *folders, *prompts, "--judge")
    files = tuple(part for file in references for part in ("--references", file))
    return (*judge, "reference", *files), (*judge, JUDGE)


def _compare(folders: Command, out: str) -> tuple[Command, ...]:
    """By each judge."""
    compare = ("stretto", "eval", "compare", *folders, "--judge")
    return (
        (*compare, "likelihood", "--out", out),
        (*compare, "reference", "--out", f"{out}-reference"),
    )


EVAL_FILES = ("config.json", "environment.json", "rows.jsonl")
JUDGED_FILES = (
    "verdicts.likelihood.jsonl", "verdicts.reference.jsonl", "summary.json", "prompts.csv",
    "means.csv",
)  # fmt: skip
VICUNA = "data/eval/vicuna_80_prompts.jsonl"
COMPARED = ("compared", "compared-reference")
TEST = ("--prompts", "data/eval/alpaca_eval_400.jsonl")
REFERENCES = (TEST[1], "data/eval/alpaca_eval_400_gpt4_1106_preview.jsonl")
PROMPTS_A_STAGE = 34
BASELINE = "sft-baseline/model"
CHOSEN_PENALTY = "penalty/chosen.json"
DECODE_S = 5
"""About what a timed decode takes."""


def _evaluation(sizes: Sizes) -> list[Stage]:
    """All arms in one run, so that all are timed against the same decodes of the baseline; a few
    prompts a stage. Then a judge."""
    return _timed("eval", sizes)


def _timed(name: str, sizes: Sizes, *before: str) -> list[Stage]:
    """`before`: the beginning of the command that evaluates, where it is not itself."""
    arms = evaluated(sizes)
    run = (
        *before, "stretto", "eval", "run", "--task", "instruct", *TEST, "--no-prompts",
        "--limit", str(sizes.eval_prompts), "--max-tokens", str(sizes.eval_tokens),
        "--baseline", BASELINE,
        *(part for arm, model in arms.items() for part in ("--arm", f"{arm}={model}")),
        "--out", name,
    )  # fmt: skip
    folders = tuple(f"{name}/{arm}" for arm in arms)
    judge = _judge(folders, TEST, *REFERENCES)
    rows, verdicts = _of_each(arms, *EVAL_FILES), _of_each(arms, *JUDGED_FILES)
    stages, done = [], 0
    while done < sizes.eval_prompts:
        until = min(done + PROMPTS_A_STAGE, sizes.eval_prompts)
        minutes = round((until - done) * (1 + len(arms)) * DECODE_S / 60)
        command = (*run, "--until", str(until))
        stages.append(Stage(f"{name}-to-{until}", max(1, minutes), (command,), rows, name))
        done = until
    stages.append(Stage(f"{name}-judge", _minutes(sizes, 2 * len(arms)), judge, verdicts, name))
    return stages


def _penalties(sizes: Sizes) -> Stage:
    """A repetition penalty under which the baseline's answers end: chosen on the prompts of
    Vicuna, by the baseline alone."""
    runs = tuple(
        (
            "stretto", "eval", "run", "--task", "instruct", "--prompts", VICUNA, "--no-prompts",
            "--pairs", "0", "--limit", str(min(80, sizes.eval_prompts)),
            "--max-tokens", str(sizes.eval_tokens), "--repetition-penalty", penalty,
            "--baseline", "none", "--model", BASELINE, "--method", "sequential",
            "--out", f"penalty/{penalty}",
        )
        for penalty in sizes.penalties
    )  # fmt: skip
    folders = tuple(f"penalty/{penalty}" for penalty in sizes.penalties)
    choose = ("python", "penalty.py", "choose", *folders, "--out", CHOSEN_PENALTY)
    rows = _of_each(sizes.penalties, "config.json", "environment.json", "rows.jsonl")
    minutes = _minutes(sizes, 3 * len(sizes.penalties))
    return Stage("penalty", minutes, (*runs, choose), (*rows, "chosen.json"))


def _evaluation_penalised(sizes: Sizes) -> list[Stage]:
    """The same with the penalty for all sides, so that hardly an answer runs in a loop to its last
    token."""
    return _timed("eval-penalised", sizes, "python", "penalty.py", "with", CHOSEN_PENALTY)


def _of_each(arms: Iterable[str], *files: str) -> Command:
    return tuple(f"{name}/{file}" for name in arms for file in files)


MULTIPART = {
    "sequential": ("--model", "multipart-baseline/model", "--method", "sequential"),
    "pasta": ("--model", "multipart-pasta/model"),
    "no-sync": ("--model", "multipart-pasta/model", "--no-joins"),
}


def _evaluation_multipart(sizes: Sizes) -> list[Stage]:
    stages = []
    for name, settings in MULTIPART.items():
        out = f"eval-multipart-{name}"
        run = (
            "stretto", "eval", "run", "--task", "multipart", "--split", "test", "--pairs", "0",
            "--limit", str(sizes.eval_prompts), *settings,
            "--baseline", "multipart-baseline/model",
            "--max-tokens", str(sizes.max_tokens + 192), "--out", out,
        )  # fmt: skip
        stages.append(Stage(out, _minutes(sizes, 3), (run,), (".",)))
    return stages


def _report(sizes: Sizes) -> Stage:
    runs = tuple(f"eval/{name}" for name in evaluated(sizes))
    penalised = tuple(f"eval-penalised/{name}" for name in evaluated(sizes))
    parts = tuple(f"eval-multipart-{name}" for name in MULTIPART)
    against = ("eval/apar", *(run for run in runs if run != "eval/apar"))
    commands = (
        *_compare(runs, "report/instruct"),
        *_compare(against, "report/against-apar"),
        *_compare(penalised, "report/penalised"),
        *(
            ("stretto", "eval", "plot", *own, "--judge", "likelihood", "--out", f"report/{out}")
            for own, out in ((runs, "plots"), (penalised, "penalised-plots"))
        ),
        ("stretto", "eval", "compare", *parts, "--out", "report/multipart"),
    )
    names = ("instruct", "against-apar", "penalised")
    references = (f"{name}-reference" for name in names)
    kept = (*names, *references, "plots", "penalised-plots", "multipart")
    return Stage("report", 1, commands, kept)


def _minutes(sizes: Sizes, minutes: int) -> int:
    return max(1, round(minutes * sizes.minutes))
