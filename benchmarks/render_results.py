"""Renders docs/results.md from the committed results, so that no figure can drift.

    python benchmarks/render_results.py

Every folder in `benchmarks/results` that has a `run.json` becomes a section: its command, its
machine, and its tables, with the columns that `COLUMNS` chooses. `FINDINGS` has the sentences on
top.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"

INTRO = """\
# Results

What Stretto was measured to do, from the folders in
[benchmarks/results](../benchmarks/results). This page is rendered from them by
`benchmarks/render_results.py`, and a test compares: no figure here is typed by hand.
[measurement.md](measurement.md) has the rules and the definition of each figure; the `run.json` of
each folder has versions, settings and definitions as they were in that run.

To measure on your own machine, run the commands below on a quiet one, with another `--out`.
"""

TEXTS = {
    "forks": "k threads of n forced tokens against the same tokens one after the other.",
    "step": "One step for r rows of r threads over a shared prefix, against one row.",
    "peers": "Greedy decoding against other runtimes: same prompts, same weights, one process.",
    "scale": "Cost of a token and memory by threads, length of the prefix and size of the pool, "
    "beside a batch of copied prefixes.",
    "weights": "What rounded weights cost: perplexity and greedy agreement over texts.",
    "serving": "`stretto serve` under load from another process: the same requests, more clients. "
    "`server_share` is all that the server takes over the engine's own time, `pass_ratio` a pass "
    "over one of the same requests in one process without a server; `cache`: prompts shared, all "
    "of them distinct, over not shared.",
    "e2e": "A method against sequential decoding of the same weights, over a file of prompts. A "
    "method that writes a shorter answer is faster by that alone: read `realized` with the texts "
    "in `rows.jsonl`.",
}

COLUMNS: dict[tuple[str, str], str] = {
    ("step", "summary"): "context rows step_ratio step_low step_high ratio low high pairs step_ms "
    "pass_ms scheduler_share bandwidth_share flops_share",
    ("forks", "summary"): "forks tokens theoretical realized low high pairs parallel_s "
    "sequential_s",
    ("peers", "summary"): "context rows ours peer ratio low high pairs ours_tokens_per_s "
    "agree_tokens ours_logit_error peer_logit_error",
    ("peers", "forks"): "context forks tokens ours peer forks_ratio forks_low forks_high pairs "
    "forks_s sequential_s",
    ("scale", "summary"): "pool_slots context threads token_ms over_one low high pairs copy_ratio "
    "copy_low copy_high",
    ("scale", "memory"): "context threads own_tokens kv_bytes kv_ratio rss_bytes rss_ratio "
    "copy_kv_over_own copy_rss_bytes",
    ("weights", "summary"): "side windows perplexity ratio low high to_bf16 to_bf16_low "
    "to_bf16_high agreement kl weight_mb",
    ("serving", "summary"): "clients requests unfinished same near_ties different ttft_p50_ms "
    "ttft_p95_ms gap_p50_ms gap_p95_ms tokens_per_s direct_tokens_per_s speedup low high pairs "
    "server_share between_share loop_share aside_share scheduler_share forward_ms "
    "direct_forward_ms pass_ms direct_pass_ms pass_ratio pass_low pass_high",
    ("serving", "cache"): "cache clients requests unfinished same near_ties different cached_share "
    "server_share scheduler_share pass_ms pass_ratio pass_low pass_high pairs",
    ("e2e", "summary"): "",
}
"""Columns that are shown of a benchmark's table; all where it is not named. What can be reckoned
from the others is left out."""

TIE_BELOW = 1.25
TIE_PAIRS = 7

Row = dict[str, str]


@dataclass(frozen=True)
class Result:
    """A result folder: its `run.json`, and its CSV files by name."""

    name: str
    run: dict[str, Any]
    tables: dict[str, list[Row]]

    @classmethod
    def read(cls, folder: Path) -> Result:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        tables = {}
        for path in sorted(folder.glob("*.csv"), key=lambda p: (p.stem != "summary", p.stem)):
            with path.open(encoding="utf-8", newline="") as file:
                tables[path.stem] = list(csv.DictReader(file))
        return cls(folder.name, run, tables)

    @property
    def kind(self) -> str:
        return str(self.run.get("benchmark", "e2e"))

    @property
    def what(self) -> str:
        """Engine and weights, and the model unless it is the default one."""
        run = self.run
        names = [run.get("engine", "hf"), *str(run.get("dtype", "bfloat16")).split(",")]
        if str(run.get("model", "")).startswith("random"):
            names.append("random weights of a 0.5B shape")
        return ", ".join(names)

    @property
    def command(self) -> str:
        """What measures this again: where the engine was not named it was `auto`, or there was but
        one, and another one may be chosen today than `hf`. `weights` has every engine."""
        command = str(self.run["command"])
        is_hf = self.kind != "weights" and self.run.get("engine", "hf") == "hf"
        if is_hf and "--engine" not in command:
            return f"{command} --engine hf"
        return command


def render(results: Path = RESULTS) -> str:
    """The page."""
    found = [Result.read(path.parent) for path in sorted(results.glob("*/run.json"))]
    said = [f"- {line}" for result in found for line in findings(result)]
    sections = [section(result) for result in found]
    glance = ["## At a glance\n\n" + "\n".join(said) + "\n"] if said else []
    return "\n".join([INTRO, *glance, *sections])


def section(result: Result) -> str:
    machine, folder = result.run["machine"], f"../benchmarks/results/{result.name}"
    lines = [f"## {result.name}\n"]
    if result.kind in TEXTS:
        lines += [TEXTS[result.kind] + "\n"]
    lines += [f"```sh\n{result.command}\n```\n"]
    lines += [
        f"Measured with {result.what} on {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['torch_threads']} threads, torch {machine['versions']['torch']}, "
        f"revision {machine['revision']}.\n"
    ]
    for peer in result.run.get("peers", []) if result.kind == "peers" else []:
        if peer.get("built_for"):
            name = f"{peer['name']} ({peer['version']})"
            lines += [f"{name} says that it was built for: `{peer['built_for']}`.\n"]
    links = []
    for name, rows in result.tables.items():
        links += [f"[{name}.csv]({folder}/{name}.csv)"]
        wanted = COLUMNS.get((result.kind, name))
        shown = list(rows[0]) if rows else []
        if wanted is not None:
            shown = [column for column in wanted.split() if column in shown]
        if shown:
            lines += [table(rows, shown) + "\n"]
    links += [f"[plot]({folder}/plot.png)", f"[run.json]({folder}/run.json)"]
    return "\n".join([*lines, ", ".join(links) + "\n"])


def table(rows: list[Row], columns: list[str]) -> str:
    head = [" | ".join(columns), " | ".join("---" for _ in columns)]
    body = [" | ".join(cell(row[column]) for column in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in [*head, *body])


def cell(text: str) -> str:
    """Four significant digits of a fraction; whole numbers and words as they are."""
    if not text:
        return "–"
    try:
        return text if text.lstrip("-").isdigit() else f"{float(text):.4g}"
    except ValueError:
        return text


# -- sentences -------------------------------------------------------------------------------------


def findings(result: Result) -> Iterator[str]:
    """What a result says in a sentence each, with the folder that says it."""
    for line in FINDINGS.get(result.kind, lambda _: iter(()))(result):
        yield f"{line} ([{result.name}](#{result.name}))"


def of_step(result: Result) -> Iterator[str]:
    for row in result.tables["summary"]:
        if "step_ratio" in row and row["rows"] in ("4", "8"):
            same = ", no longer as far as can be told" if is_tie(row, "step_ratio", "step_") else ""
            yield (
                f"{result.what}: a step of {row['rows']} rows takes "
                f"{interval(row, 'step_ratio', 'step_')} times that of one{same}, at "
                f"{row['context']} tokens of context."
            )
    linear = result.run["machine"].get("linear")
    if linear is not None:
        yield (
            f"{result.what}: the linear layers read their weights for one row at "
            f"{linear['linear_share']:.1%} of the measured bandwidth "
            f"({linear['linear_low']:.1%}–{linear['linear_high']:.1%})."
        )


def of_forks(result: Result) -> Iterator[str]:
    for row in result.tables["summary"]:
        if row["forks"] == "4":
            yield (
                f"{result.what}: 4 forks of {row['tokens']} tokens are {interval(row, 'realized')} "
                "times as fast as the same tokens one after the other"
                f"{tie(row, 'realized')} ({cell(row['theoretical'])} is possible)."
            )


PAIRED = {("bfloat16", "BF16"), ("int8", "Q8_0")}
"""Our weights and llama.cpp's that are of the same size."""


def of_peers(result: Result) -> Iterator[str]:
    random = ", random weights of a 0.5B shape" if "random" in result.what else ""
    for row in result.tables["summary"]:
        if (row["ours"].split()[-1], row["peer"].split()[-1]) in PAIRED:
            yield (
                f"{row['ours']}{random}: {interval(row, 'ratio')} times the tokens per second of "
                f"{row['peer']}, {row['rows']} sequences at {row['context']} tokens of context"
                f"{tie(row, 'ratio')}."
            )
    for row in result.tables.get("forks", []):
        if row["fastest"] == "True":
            yield (
                f"{row['ours']}{random}: {row['forks']} forks of {row['tokens']} tokens, end to "
                f"end, take {cell(row['forks_s'])} s; as many tokens one after the other take "
                f"{cell(row['sequential_s'])} s in {row['peer']}, its fastest precision: a ratio "
                f"of {interval(row, 'forks_ratio', 'forks_')}{tie(row, 'forks_ratio', 'forks_')}."
            )


def of_scale(result: Result) -> Iterator[str]:
    for row in result.tables.get("memory", []):
        if row["threads"] == "8" and row["kv_ratio"]:
            more = row["copy_kv_over_own"]
            copy = f" (a batch of copies holds {cell(more)} times ours)" if more else ""
            yield (
                f"{result.what}: 8 threads over a prefix of {row['context']} tokens hold "
                f"{cell(row['kv_ratio'])} times the keys and values of one thread and the others' "
                f"own tokens{copy}; resident memory grows {cell(row['rss_ratio'])} times as much."
            )


def of_e2e(result: Result) -> Iterator[str]:
    for row in result.tables.get("means", []):
        if row["figure"] == "realized" and row["group"] == "all" and row["geometric_mean"]:
            method = result.run["settings"].get("method", result.name)
            yield (
                f"{result.what}: sequential decoding takes {interval(row, 'geometric_mean')} times "
                f"the decode time of method {method}, geometric mean of {row['prompts']} prompts"
                f"{tie(row, 'geometric_mean')}."
            )


def of_weights(result: Result) -> Iterator[str]:
    for row in result.tables["summary"]:
        if row["side"] == "fused int8":
            yield (
                f"{row['side']}: perplexity is {interval(row, 'to_bf16', 'to_bf16_')} times that "
                f"of bfloat16{tie(row, 'to_bf16', 'to_bf16_')}, and the most likely next token is "
                "float32's in "
                f"{float(row['agreement']):.1%} of cases, over {row['windows']} windows."
            )


def of_serving(result: Result) -> Iterator[str]:
    for row in result.tables["summary"]:
        if row["clients"] == "16":
            yield (
                f"{result.what}: 16 clients of `stretto serve` get {interval(row, 'speedup')} "
                "times the tokens per second of one; the server takes "
                f"{float(row['server_share']):.1%} of the engine's own time, and a pass "
                f"{interval(row, 'pass_ratio', 'pass_')} times that of the same requests without a "
                f"server{tie(row, 'pass_ratio', 'pass_')}; of {row['requests']} answers "
                f"{row['same']} have the text that one client gets, {row['near_ties']} differ from "
                f"it at a near tie, {row['different']} otherwise."
            )
    for row in result.tables.get("cache", []):
        if row["cache"] == "on":
            yield (
                f"{result.what}: where prompts are shared and all are distinct, a pass takes "
                f"{interval(row, 'pass_ratio', 'pass_')} times that of prompts that are not"
                f"{tie(row, 'pass_ratio', 'pass_')}; {float(row['cached_share']):.1%} of prompt "
                "tokens, those of the template, are not computed again."
            )


FINDINGS: dict[str, Callable[[Result], Iterator[str]]] = {
    "step": of_step,
    "forks": of_forks,
    "peers": of_peers,
    "scale": of_scale,
    "weights": of_weights,
    "serving": of_serving,
    "e2e": of_e2e,
}


def interval(row: Row, figure: str, prefix: str = "") -> str:
    """A figure with its 95 % interval."""
    low, high = row[f"{prefix}low"], row[f"{prefix}high"]
    return f"{cell(row[figure])} ({cell(low)}–{cell(high)})"


def is_tie(row: Row, figure: str, prefix: str = "") -> bool:
    """Whether a ratio says that neither side is ahead: its interval has 1 in it, or it is below
    1.25 either way and of too few pairs. Figures over prompts or windows have no pairs."""
    ratio, low, high = (float(row[name]) for name in (figure, f"{prefix}low", f"{prefix}high"))
    has_few_pairs = bool(row.get("pairs")) and int(row["pairs"]) < TIE_PAIRS
    return low <= 1 <= high or (has_few_pairs and max(ratio, 1 / ratio) < TIE_BELOW)


def tie(row: Row, figure: str, prefix: str = "") -> str:
    return ", a tie" if is_tie(row, figure, prefix) else ""


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
