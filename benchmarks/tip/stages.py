"""The stages of the TIP experiment: which commands, how large, and what is kept of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stretto.bench.stages import Command, Stage


@dataclass(frozen=True)
class Phase:
    """Some problems, and how they are learnt from. `counts`: problems of each task."""

    name: str
    sizes: str
    counts: tuple[tuple[str, int], ...]
    epochs: float
    batch: int
    lr: float

    @property
    def text(self) -> str:
        counts = ",".join(f"{task}={number}" for task, number in self.counts)
        return f"{self.name}:{self.sizes}:{counts}"


@dataclass(frozen=True)
class Grpo:
    """Steps of training by reward. `weights`: of KV, one of which is chosen on the validation
    split."""

    steps: int
    prompts: int
    samples: int
    lr: float
    weights: tuple[str, ...]
    valid_every: int
    valid: int


@dataclass(frozen=True)
class Sizes:
    """How much of everything. `test`, `valid`: problems of each task and range of sizes. `longer`:
    sizes that nothing was trained on. `minutes` scales the estimates, which are of two cores."""

    shape: str
    tasks: tuple[str, ...]
    sizes: str
    longer: str
    phases: tuple[Phase, ...]
    registers: int
    slack: int
    in_turn: int
    seeds: tuple[int, ...]
    grpo: Grpo
    test: int
    longer_test: int
    valid: int
    throughput: tuple[str, ...] = ()
    long_context: tuple[str, ...] = ()
    is_full: bool = False
    minutes: float = 1.0

    @property
    def max_tokens(self) -> int:
        """Of an answer: ten a step, as in `answers.py`."""
        return 10 * (int(self.sizes.rpartition("-")[2]) + 1)


def _mixed(program: int, tree: int, chain: int, dag: int = 0) -> tuple[tuple[str, int], ...]:
    counts = {"program": program, "tree": tree, "chain": chain, "dag": dag}
    return tuple((task, number) for task, number in counts.items() if number)


SHORT = Phase("short", "6-10", _mixed(6000, 6000, 3000), 1, 16, 2e-3)
WHOLE = Phase("whole", "12-24", _mixed(10000, 10000, 4000), 1, 16, 1e-3)
NORMAL = Sizes(
    shape="tiny-1m",
    tasks=("program", "tree", "chain"),
    sizes="12-24",
    longer="28-40",
    phases=(SHORT, WHOLE),
    registers=8,
    slack=4,
    in_turn=4,
    seeds=(0, 1, 2),
    grpo=Grpo(40, 8, 8, 1e-4, ("0.3", "1"), 10, 39),
    test=130,
    longer_test=65,
    valid=65,
)
FULL = Sizes(
    shape="tiny-1m",
    tasks=("program", "tree", "chain", "dag"),
    sizes="12-24",
    longer="28-40",
    phases=(
        Phase("short", "6-10", _mixed(8000, 8000, 4000, 8000), 1, 16, 2e-3),
        Phase("whole", "12-24", _mixed(16000, 16000, 8000, 16000), 1, 16, 1e-3),
    ),
    registers=8,
    slack=4,
    in_turn=4,
    seeds=(0, 1, 2),
    grpo=Grpo(80, 12, 8, 1e-4, ("0.1", "0.3", "1", "3"), 10, 65),
    test=260,
    longer_test=130,
    valid=130,
    is_full=True,
    minutes=3.0,
)
QUICK = Sizes(
    shape="tiny-1m",
    tasks=("program", "tree", "chain"),
    sizes="6-7",
    longer="8-9",
    phases=(
        Phase("short", "6-6", _mixed(8, 8, 8), 1, 8, 2e-3),
        Phase("whole", "6-7", _mixed(8, 8, 8), 1, 8, 1e-3),
    ),
    registers=8,
    slack=4,
    in_turn=4,
    seeds=(0,),
    grpo=Grpo(1, 2, 2, 1e-4, ("0.3",), 1, 2),
    test=2,
    longer_test=2,
    valid=2,
    throughput=("--num", "4", "--pairs", "1", "--sizes", "6-7"),
    long_context=("--context", "96", "--live", "32", "--tokens", "8", "--pairs", "1"),
    minutes=0.02,
)


# -- arms ------------------------------------------------------------------------------------------

LABELS = ("tip", "in-turn", "random")
"""How rows are labelled. The dense arm learns those of `tip` without their registers."""
SFT = {
    "dense-sft": ("tip", "--baseline"),
    "tip-sft": ("tip", "--dialect", "tip"),
    "in-turn-sft": ("in-turn", "--dialect", "tip"),
    "random-sft": ("random", "--dialect", "tip"),
}
GRPO = {"dense-grpo": "dense-sft", "tip-grpo": "tip-sft", "in-turn-grpo": "in-turn-sft"}
"""Without a weight of KV, and what each goes on from."""
KV = "tip-kv"
"""With the weight that was chosen; goes on from `tip-sft` as well."""
ONE_SEED = ("random-sft",)


def arms(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """All arms with a model of their own, and their training seeds."""
    few = sizes.seeds if sizes.is_full else sizes.seeds[:1]
    names = (*SFT, *GRPO, KV)
    return {name: few if name in ONE_SEED else sizes.seeds for name in names}


def model_of(sizes: Sizes, arm: str, seed: int) -> str:
    """Where an arm's model is, in the work folder."""
    if arm == KV and seed == sizes.seeds[0]:
        return "choose/model"
    if arm in SFT:
        return f"{arm}-{seed}/{sizes.phases[-1].name}/model"
    return f"{arm}-{seed}/model"


def stages_of(sizes: Sizes) -> list[Stage]:
    """All stages, in an order in which each finds what it reads."""
    seeds = sizes.seeds
    return [
        _data(sizes),
        *(_sft(sizes, arm, seed) for seed in seeds for arm in ("dense-sft", "tip-sft")),
        *(_grpo(sizes, "tip-grpo", seed) for seed in seeds[:1]),
        *(_weighted(sizes, weight) for weight in sizes.grpo.weights),
        *_choose(sizes),
        *(_grpo(sizes, KV, seed) for seed in seeds[1:]),
        *(_grpo(sizes, "tip-grpo", seed) for seed in seeds[1:]),
        *(_grpo(sizes, "dense-grpo", seed) for seed in seeds),
        *_budgets(sizes),
        *(_sft(sizes, "in-turn-sft", seed) for seed in seeds),
        *(_grpo(sizes, "in-turn-grpo", seed) for seed in seeds),
        *(_sft(sizes, "random-sft", seed) for seed in arms(sizes)["random-sft"]),
        *(_answers(sizes, arm) for arm in arms(sizes)),
        _matrix(sizes),
        *_policies(sizes),
        *_speed(sizes),
        _report(sizes),
    ]


# -- training --------------------------------------------------------------------------------------


def _data(sizes: Sizes) -> Stage:
    labels = {
        "tip": f"liveness-{sizes.registers}-{sizes.slack}",
        "in-turn": f"round-robin-{sizes.in_turn}",
        "random": f"random-{sizes.registers}",
    }
    command = (
        "python", "prepare.py", "--shape", sizes.shape, "--registers", str(sizes.registers),
        *(part for phase in sizes.phases for part in ("--phase", phase.text)),
        *(part for name in LABELS for part in ("--labels", f"{name}={labels[name]}")),
        "--seeds", ",".join(map(str, sizes.seeds)), "--out", "data",
    )  # fmt: skip
    return Stage("data", _minutes(sizes, 3), (command,))


def _sft(sizes: Sizes, arm: str, seed: int) -> Stage:
    """One run a phase, each from the model of the one before."""
    labels, *settings = SFT[arm]
    if "--baseline" in settings:
        model = f"data/start-{seed}-plain"
    else:
        model = f"data/start-{seed}"
        settings += ["--registers", str(sizes.registers)]
    commands = []
    for phase in sizes.phases:
        out, rows = f"{arm}-{seed}/{phase.name}", f"data/{phase.name}-{labels}.jsonl"
        command = (
            "stretto", "train", "sft", "--model", model, "--data", rows,
            *settings, "--full", "--dtype", "float32", "--schedule", "cosine",
            "--lr", str(phase.lr), "--batch", str(phase.batch), "--epochs", str(phase.epochs),
            "--seed", str(seed), "--checkpoint-every", "200", "--out", out,
        )  # fmt: skip
        commands.append(command)
        model = f"{out}/model"
    last = sizes.phases[-1].name
    files = ("metrics.jsonl", "summary.json", "config.json", "environment.json")
    kept = [f"{phase.name}/{file}" for phase in sizes.phases for file in files]
    return Stage(f"{arm}-{seed}", _minutes(sizes, 12), tuple(commands), (f"{last}/model", *kept))


GRPO_FILES = ("model", "metrics.jsonl", "summary.json", "config.json", "environment.json")


def _grpo(sizes: Sizes, arm: str, seed: int) -> Stage:
    """An arm of training by reward. With the weight of KV that was chosen, or none."""
    weight = ("--config", "choose/kv.toml") if arm == KV else ("--kv-weight", "0")
    start = model_of(sizes, GRPO.get(arm, "tip-sft"), seed)
    return _rewarded(sizes, f"{arm}-{seed}", start, seed, weight)


def _weighted(sizes: Sizes, weight: str) -> Stage:
    """The first seed with one of the weights that there are to choose from."""
    seed = sizes.seeds[0]
    start = model_of(sizes, "tip-sft", seed)
    return _rewarded(sizes, _weighted_run(sizes, weight), start, seed, ("--kv-weight", weight))


def _weighted_run(sizes: Sizes, weight: str) -> str:
    return f"{KV}-{weight}-{sizes.seeds[0]}"


def _rewarded(sizes: Sizes, name: str, model: str, seed: int, weight: Sequence[str]) -> Stage:
    own = sizes.grpo
    command = (
        "stretto", "train", "grpo", *weight, "--model", model, "--task", ",".join(sizes.tasks),
        "--sizes", sizes.sizes, "--split", "train", "--task-seed", "1",
        "--limit", str(own.steps * own.prompts),
        "--valid-split", "valid", "--valid-limit", str(own.valid),
        "--valid-every", str(own.valid_every), "--steps", str(own.steps),
        "--prompts-per-step", str(own.prompts), "--samples", str(own.samples),
        "--max-tokens", str(sizes.max_tokens), "--full", "--dtype", "float32",
        "--lr", str(own.lr), "--seed", str(seed), "--out", name,
    )  # fmt: skip
    return Stage(name, _minutes(sizes, 7), (command,), GRPO_FILES)


# -- what is chosen on the validation split --------------------------------------------------------


def _choose(sizes: Sizes) -> list[Stage]:
    """The weight of KV: by the answers of the first seed."""
    seed = sizes.seeds[0]
    runs = {"0": f"tip-grpo-{seed}"} | {w: _weighted_run(sizes, w) for w in sizes.grpo.weights}
    answers = tuple(_valid(sizes, f"{run}/model", run) for run in runs.values())
    kept = tuple(f"{run}.jsonl" for run in runs.values())
    plain = runs.pop("0")
    choose = (
        "python", "choose.py", "--plain", f"valid/{plain}.jsonl",
        *(part for w, run in runs.items() for part in ("--weight", f"{w}=valid/{run}.jsonl:{run}")),
        "--out", "choose",
    )  # fmt: skip
    return [
        Stage("valid-weights", _minutes(sizes, 5), answers, kept, "valid"),
        Stage("choose", 1, (choose,), ("kv.toml", "choice.json", "metrics.jsonl", "model")),
    ]


def _budgets(sizes: Sizes) -> list[Stage]:
    """Budgets of the baselines: where they hold what TIP with the chosen weight holds, over its
    seeds."""
    names = {seed: f"{KV}-{seed}" for seed in sizes.seeds}
    answers = tuple(_valid(sizes, model_of(sizes, KV, s), name) for s, name in names.items())
    kept = tuple(f"{name}.jsonl" for name in names.values())
    budgets = (
        "python", "budgets.py", "--model", model_of(sizes, "dense-grpo", sizes.seeds[0]),
        *(part for name in names.values() for part in ("--held", f"valid/{name}.jsonl")),
        "--tasks", ",".join(sizes.tasks), "--sizes", sizes.sizes,
        "--num", str(sizes.valid), "--split", "valid", "--out", "budgets/budgets.json",
    )  # fmt: skip
    return [
        Stage("valid-held", _minutes(sizes, 5), answers, kept, "valid"),
        Stage("budgets", _minutes(sizes, 25), (budgets,), ("budgets.json",)),
    ]


def _valid(sizes: Sizes, model: str, name: str) -> Command:
    return (
        "python", "answers.py", "--model", model, "--tasks", ",".join(sizes.tasks),
        "--sizes", sizes.sizes, "--num", str(sizes.valid), "--split", "valid",
        "--out", f"valid/{name}.jsonl",
    )  # fmt: skip


# -- what is reported ------------------------------------------------------------------------------

CACHES = (
    ("tip-sft", "remembering"),
    ("tip-kv", "remembering"),
    ("dense-sft", "oracle"),
    ("dense-grpo", "oracle"),
    ("tip-sft", "restart"),
    ("tip-kv", "restart"),
)
"""Models with another cache than they were trained with; the first seed unless all are asked."""


def _answers(sizes: Sizes, arm: str) -> Stage:
    """Answers to test problems, as long as trained on and longer."""
    names = {seed: f"{arm}-{seed}" for seed in arms(sizes)[arm]}
    commands = tuple(
        _test(sizes, model_of(sizes, arm, seed), f"answers/{name}", lengths=lengths, number=number)
        for seed, name in names.items()
        for lengths, number in ((sizes.sizes, sizes.test), (sizes.longer, sizes.longer_test))
    )
    return Stage(
        f"answers-{arm}",
        _minutes(sizes, 2 * len(names)),
        commands,
        _files(names.values()),
        "answers",
    )


def _matrix(sizes: Sizes) -> Stage:
    seeds = sizes.seeds if sizes.is_full else sizes.seeds[:1]
    commands = tuple(
        _test(sizes, model_of(sizes, arm, seed), f"caches/{arm}-{seed}", way=way)
        for arm, way in CACHES
        for seed in seeds
    )
    names = dict.fromkeys(f"{arm}-{seed}" for arm, _ in CACHES for seed in seeds)
    return Stage("caches", _minutes(sizes, 15), commands, _files(names))


def _policies(sizes: Sizes) -> list[Stage]:
    """The baselines on the dense model, a stage a seed."""
    models = ("dense-sft", "dense-grpo") if sizes.is_full else ("dense-grpo",)
    stages = []
    for name, arm, seed in [(f"{a}-{s}", a, s) for a in models for s in sizes.seeds]:
        command = _test(sizes, model_of(sizes, arm, seed), f"policies/{name}", way="budgets")
        command = (*command, "--budgets", "budgets/budgets.json")
        minutes = _minutes(sizes, 10)
        stages.append(Stage(f"policies-{name}", minutes, (command,), _files([name]), "policies"))
    return stages


def _test(
    sizes: Sizes, model: str, out: str, *,
    way: str = "native", lengths: str | None = None, number: int | None = None,
) -> Command:  # fmt: skip
    return (
        "python", "answers.py", "--model", model, "--tasks", ",".join(sizes.tasks),
        "--sizes", sizes.sizes if lengths is None else lengths,
        "--num", str(sizes.test if number is None else number),
        "--split", "test", "--as", way, "--out", f"{out}.jsonl",
    )  # fmt: skip


def _files(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name}{end}" for name in names for end in (".jsonl", ".times.jsonl"))


def _speed(sizes: Sizes) -> list[Stage]:
    seed = sizes.seeds[0]
    throughput = (
        "python", "throughput.py", "--dense", model_of(sizes, "dense-grpo", seed),
        "--tip", model_of(sizes, KV, seed), *sizes.throughput, "--out", "throughput/result.json",
    )  # fmt: skip
    context = (
        "python", "long_context.py", *sizes.long_context, "--out", "long-context/result.json",
    )  # fmt: skip
    return [
        Stage("throughput", _minutes(sizes, 15), (throughput,), ("result.json",)),
        Stage("long-context", _minutes(sizes, 15), (context,), ("result.json",)),
    ]


def _report(sizes: Sizes) -> Stage:
    command = (
        "python", "report.py", "--sizes", sizes.sizes, "--longer", sizes.longer, "--out", "report",
    )  # fmt: skip
    return Stage("report", 1, (command,), (".",))


def _minutes(sizes: Sizes, minutes: int) -> int:
    return max(1, round(minutes * sizes.minutes))
