"""The stages of the TIP experiment: which commands, and what is kept of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sizes import FULL, NORMAL, QUICK, Lesson, Sizes

from stretto.bench.stages import Command, Stage

__all__ = ["FULL", "KV", "NORMAL", "QUICK", "arms", "model_of", "stages_of"]

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
BASE = "base"
"""What all arms and seeds go on from: it has learnt dense solutions of short problems."""
KV = "tip-kv"
"""With the weight that was chosen; goes on from `tip-sft` as well."""
ONE_SEED = ("random-sft",)


def arms(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """All arms with a model of their own, and their training seeds. Each comes after what it goes
    on from."""
    few = sizes.seeds if sizes.is_full else sizes.seeds[:1]
    names = ("dense-sft", "dense-grpo", "tip-sft", "tip-grpo", KV, "in-turn-sft", "in-turn-grpo")
    return dict.fromkeys(names, sizes.seeds) | dict.fromkeys(ONE_SEED, few)


def model_of(sizes: Sizes, arm: str, seed: int) -> str:
    """Where an arm's model is, in the work folder."""
    if arm == KV and seed == sizes.seeds[0]:
        return "choose/model"
    return f"{arm}-{seed}/model"


def stages_of(sizes: Sizes) -> list[Stage]:
    """All stages, in an order in which each finds what it reads. Whether the problems are learnt at
    all is seen first; then what the first seed has to choose; then one seed after the other. A
    model is asked as soon as it is trained: what comes later needs few of those before."""
    first, *others = sizes.seeds
    supervised = ("tip-sft", "dense-sft")
    there = (*supervised, "tip-grpo", KV)
    return [
        _data(sizes),
        _base(sizes),
        *(_trained(sizes, arm, first) for arm in supervised),
        _gate(sizes, supervised),
        *(stage for arm in supervised for stage in _asked_of(sizes, arm, first)),
        _trained(sizes, "tip-grpo", first),
        *(_weighted(sizes, weight) for weight in sizes.grpo.weights),
        *_choose(sizes),
        *(stage for arm in ("tip-grpo", KV) for stage in _asked_of(sizes, arm, first)),
        *_seed(sizes, first, there),
        *_speed(sizes),
        *(stage for seed in others for stage in _seed(sizes, seed)),
        _report(sizes),
    ]


def _seed(sizes: Sizes, seed: int, there: Sequence[str] = ()) -> list[Stage]:
    """All of a seed, but for the arms that are `there`."""
    own = [arm for arm, seeds in arms(sizes).items() if seed in seeds and arm not in there]
    return [
        *(
            stage
            for arm in own
            for stage in (_trained(sizes, arm, seed), *_asked_of(sizes, arm, seed))
        ),
        _budgets(sizes, seed),
        *_policies(sizes, seed),
    ]


# -- training --------------------------------------------------------------------------------------

RUN_FILES = ("metrics.jsonl", "summary.json", "config.json", "environment.json")


def _data(sizes: Sizes) -> Stage:
    labels = {
        "tip": f"liveness-{sizes.registers}-{sizes.slack}-shifted",
        "in-turn": f"round-robin-{sizes.in_turn}",
        "random": f"random-{sizes.registers}",
    }
    command = (
        "python", "prepare.py", "--shape", sizes.shape, "--registers", str(sizes.registers),
        *(part for group in sizes.base.groups for part in ("--base", group.text)),
        *(part for group in sizes.own.groups for part in ("--phase", group.text)),
        *(part for name in LABELS for part in ("--labels", f"{name}={labels[name]}")),
        "--out", "data",
    )  # fmt: skip
    return Stage("data", _minutes(sizes, 1), (command,))


def _base(sizes: Sizes) -> Stage:
    rows = [f"data/{group.name}.jsonl" for group in sizes.base.groups]
    command = _learn(sizes.base, "data/start", rows, sizes.seeds[0], ("--baseline",), out=BASE)
    minutes = max(1, round(sizes.base.minutes(has_registers=False)))
    return Stage(BASE, minutes, (command,), (*RUN_FILES, "model"))


def _trained(sizes: Sizes, arm: str, seed: int) -> Stage:
    return (_sft if arm in SFT else _grpo)(sizes, arm, seed)


def _sft(sizes: Sizes, arm: str, seed: int) -> Stage:
    labels, *settings = SFT[arm]
    has_registers = "--baseline" not in settings
    if has_registers:
        settings += ["--registers", str(sizes.registers)]
    rows = [f"data/{group.name}-{labels}.jsonl" for group in sizes.own.groups]
    name = f"{arm}-{seed}"
    command = _learn(sizes.own, f"{BASE}/model", rows, seed, settings, out=name)
    kept = (*RUN_FILES, *_weights(name, sizes, "model"))
    minutes = max(1, round(sizes.own.minutes(has_registers=has_registers)))
    return Stage(name, minutes, (command,), kept)


def _learn(
    lesson: Lesson, model: str, rows: Sequence[str], seed: int, settings: Sequence[str], *,
    out: str,
) -> Command:  # fmt: skip
    return (
        "stretto", "train", "sft", "--model", model,
        *(part for path in rows for part in ("--data", path)), *settings,
        "--full", "--dtype", "float32", "--schedule", "cosine", "--lr", str(lesson.lr),
        "--batch", str(lesson.batch), "--epochs", "1", "--seed", str(seed),
        "--pack-tokens", "4096", "--checkpoint-every", "500", "--out", out,
    )  # fmt: skip


def _weights(name: str, sizes: Sizes, model: str) -> list[str]:
    """The model of a run, if its weights go into the repository: those of the first seed that a
    reader may want to try (and `choose/model`, the best of them)."""
    seed = sizes.seeds[0]
    return [model] if name in (f"tip-sft-{seed}", f"dense-grpo-{seed}") else []


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
    """All with the same settings, so that arms differ in the weight alone."""
    own = sizes.grpo
    command = (
        "stretto", "train", "grpo", *weight, "--kv-tokens", "control", "--model", model,
        "--task", ",".join(sizes.tasks), "--sizes", sizes.sizes, "--split", "train",
        "--task-seed", "1", "--limit", str(own.steps * own.prompts),
        "--valid-split", "valid", "--valid-limit", str(own.valid),
        "--valid-every", str(own.valid_every), "--steps", str(own.steps),
        "--prompts-per-step", str(own.prompts), "--samples", str(own.samples),
        "--minibatches", str(own.minibatches), "--max-tokens", str(sizes.max_tokens),
        "--pack-tokens", "4096", "--full", "--dtype", "float32", "--lr", str(own.lr),
        "--warmup", "0.05", "--seed", str(seed), "--out", name,
    )  # fmt: skip
    kept = (*RUN_FILES, *_weights(name, sizes, "model"))
    return Stage(name, max(1, round(own.minutes)), (command,), kept)


# -- what is chosen on the validation split --------------------------------------------------------


def _gate(sizes: Sizes, supervised: Sequence[str]) -> Stage:
    """Whether the first seed has learnt the problems, and what it holds."""
    runs = {f"{arm}-{sizes.seeds[0]}": model_of(sizes, arm, sizes.seeds[0]) for arm in supervised}
    answers = tuple(_valid(sizes, m, f"valid-sft/{name}") for name, m in runs.items())
    gate = (
        "python", "gate.py", *(f"valid-sft/{name}.jsonl" for name in runs),
        "--least", f"{sizes.gate:g}", "--out", "valid-sft/gate.json",
    )  # fmt: skip
    kept = ("gate.json", *_files(runs))
    return Stage("valid-sft", _minutes(sizes, 1), (*answers, gate), kept)


def _choose(sizes: Sizes) -> list[Stage]:
    """The weight of KV: by the answers of the first seed."""
    seed = sizes.seeds[0]
    runs = {"0": f"tip-grpo-{seed}"} | {w: _weighted_run(sizes, w) for w in sizes.grpo.weights}
    folder = "valid-weights"
    answers = tuple(_valid(sizes, f"{run}/model", f"{folder}/{run}") for run in runs.values())
    kept = _files(runs.values())
    plain = runs.pop("0")
    weights = [f"{w}={folder}/{run}.jsonl:{run}" for w, run in runs.items()]
    choose = (
        "python", "choose.py", "--plain", f"{folder}/{plain}.jsonl",
        *(part for weight in weights for part in ("--weight", weight)), "--out", "choose",
    )  # fmt: skip
    return [
        Stage(folder, _minutes(sizes, 1), answers, kept),
        Stage("choose", 1, (choose,), ("kv.toml", "choice.json", "metrics.jsonl", "model")),
    ]


def _budgets(sizes: Sizes, seed: int) -> Stage:
    """Budgets of the baselines: where they hold what TIP with the chosen weight holds."""
    folder, held = f"budgets-{seed}", f"{KV}-{seed}"
    answers = _valid(sizes, model_of(sizes, KV, seed), f"{folder}/{held}")
    budgets = (
        "python", "budgets.py", "--model", model_of(sizes, "dense-grpo", seed),
        "--held", f"{folder}/{held}.jsonl", "--tasks", ",".join(sizes.tasks),
        "--sizes", sizes.sizes, "--num", str(sizes.valid), "--split", "valid",
        "--out", f"{folder}/budgets.json",
    )  # fmt: skip
    kept = ("budgets.json", *_files([held]))
    return Stage(folder, _minutes(sizes, 14), (answers, budgets), kept)


def _valid(sizes: Sizes, model: str, out: str) -> Command:
    return _asked(sizes, model, out, split="valid", number=sizes.valid)


# -- what is reported ------------------------------------------------------------------------------

CACHES = {
    "dense-sft": ("oracle",),
    "dense-grpo": ("oracle",),
    "tip-sft": ("remembering", "restart"),
    "tip-kv": ("remembering", "restart"),
}
"""Other caches than models were trained with; the first seed's unless all are asked."""


def _asked_of(sizes: Sizes, arm: str, seed: int) -> list[Stage]:
    """Answers of a model to test problems, as long as trained on and longer, and as many as are
    asked for with other caches."""
    name, model = f"{arm}-{seed}", model_of(sizes, arm, seed)
    kept = _files([name])
    commands = tuple(
        _asked(sizes, model, f"answers-{name}/{name}", lengths=lengths, number=number)
        for lengths, number in ((sizes.sizes, sizes.test), (sizes.longer, sizes.longer_test))
    )
    stages = [Stage(f"answers-{name}", _minutes(sizes, 0.7), commands, kept)]
    if arm in CACHES and (sizes.is_full or seed == sizes.seeds[0]):
        out = f"caches-{name}/{name}"
        others = tuple(
            _asked(sizes, model, out, way=way, number=sizes.caches) for way in CACHES[arm]
        )
        stages.append(Stage(f"caches-{name}", _minutes(sizes, 1.5), others, kept))
    return stages


def _policies(sizes: Sizes, seed: int) -> list[Stage]:
    """The baselines on the dense model."""
    stages = []
    for arm in ("dense-sft", "dense-grpo") if sizes.is_full else ("dense-grpo",):
        name = f"{arm}-{seed}"
        command = _asked(
            sizes, model_of(sizes, arm, seed), f"policies-{name}/{name}", way="budgets"
        )
        command = (*command, "--budgets", f"budgets-{seed}/budgets.json")
        stages.append(Stage(f"policies-{name}", _minutes(sizes, 7), (command,), _files([name])))
    return stages


def _asked(
    sizes: Sizes, model: str, out: str, *, split: str = "test",
    way: str = "native", lengths: str | None = None, number: int | None = None,
) -> Command:  # fmt: skip
    return (
        "python", "answers.py", "--model", model, "--tasks", ",".join(sizes.tasks),
        "--sizes", sizes.sizes if lengths is None else lengths,
        "--num", str(sizes.test if number is None else number),
        "--split", split, "--as", way, "--out", f"{out}.jsonl",
    )  # fmt: skip


def _files(names: Iterable[str]) -> tuple[str, ...]:
    """What `answers.py` writes."""
    ends = (".jsonl", ".times.jsonl", ".settings.json")
    return tuple(f"{name}{end}" for name in names for end in ends)


def _speed(sizes: Sizes) -> list[Stage]:
    seed = sizes.seeds[0]
    throughput = (
        "python", "throughput.py", "--dense", model_of(sizes, "dense-grpo", seed),
        "--tip", model_of(sizes, KV, seed), "--sizes", sizes.sizes, *sizes.throughput,
        "--out", "throughput/result.json",
    )  # fmt: skip
    crowd = ("python", "crowd.py", *sizes.crowd, "--out", "crowd/result.json")
    context = (
        "python", "long_context.py", *sizes.long_context, "--out", "long-context/result.json",
    )  # fmt: skip
    return [
        Stage("throughput", _minutes(sizes, 5), (throughput,), ("result.json",)),
        Stage("crowd", _minutes(sizes, 7), (crowd,), ("result.json",)),
        Stage("long-context", _minutes(sizes, 5), (context,), ("result.json",)),
    ]


def _report(sizes: Sizes) -> Stage:
    command = (
        "python", "report.py", "--sizes", sizes.sizes, "--longer", sizes.longer, "--out", "report",
    )  # fmt: skip
    return Stage("report", 1, (command,), (".",))


def _minutes(sizes: Sizes, minutes: float) -> int:
    return max(1, round(minutes * sizes.minutes))
