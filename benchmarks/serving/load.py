"""What `stretto serve` does under load: clients in this process, the server in another, loopback.

    python benchmarks/serving/load.py --out benchmarks/results/serving

The same requests, of mixed lengths, are asked for by 1, 4, 16 and 64 clients at once, in several
rounds. Told of each: whether all got an end and the text that one client alone gets, how long they
waited, tokens per second, and what the server costs beside the engine: by its own clocks, and
against the same requests in one process without a server. Prompts are not shared there, since the
same ones come again; a second, shorter part tells what sharing costs where prompts are distinct.
Further options are `stretto serve`'s. Cells are kept as they come: the same command goes on where
it was killed. The exit status is 1 if a request got no end or another text.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import load_cache
from load_client import LENGTHS, Address, Ask, asks_of, crowd
from load_direct import Direct, direct
from load_figures import DEFINITIONS, NO, plot, read_gauges, summary, verdicts

from stretto.bench import report
from stretto.bench.journal import Journal
from stretto.bench.machine import describe_machine
from stretto.bench.pairs import rested, rounded, run_pair
from stretto.data.rows import prompt_id

CLIENTS = (1, 4, 16, 64)
ROUNDS = 7
CACHE_REQUESTS = 32
NUM_WARM = 4
POOL_SLOTS = 16_384
STOP_S = 60
PROMPTS = (
    "What are good habits for saving money?",
    "How can I become more confident when speaking in public?",
    "Who painted the Mona Lisa?",
    "What are the advantages and disadvantages of working from home?",
    "How do I plan a birthday party for a child?",
    "Name a colour.",
    "What makes a city pleasant to live in?",
    "How can a family throw away less food?",
    "What should I think about before buying a used car? I drive mostly in the city, sometimes "
    "with two children and a large dog, and I can spend no more than a few thousand.",
    "How do trees help the environment?",
    "Suggest ways to learn a new language at home.",
    "What is 15 plus 27?",
    "What are the stages of building a house?",
    "Why do people enjoy music?",
    "Write a short story about a lost key.",
    "Give advice to someone who adopts a puppy.",
)


@contextmanager
def server(options: Sequence[str], max_requests: int, method: str) -> Iterator[Address]:
    """A `stretto serve` of its own on a free port, ended with SIGTERM."""
    command = [sys.executable, "-m", "stretto", "serve", "--port", "0", "--json"]
    command += ["--max-requests", str(max_requests), "--deadline-s", "3600", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the server did not start; `{shlex.join(command)}` tells why")
            told = json.loads(line)
            url = urlsplit(told["url"])
            yield Address(url.hostname or "127.0.0.1", url.port or 80, told["model"], method)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def measure(address: Address, asks: Sequence[Ask], clients: int) -> dict[str, Any]:
    """A cell: what each request saw, the seconds of all, and what the server's gauges grew by."""
    before = read_gauges(address.get("/metrics"))
    seen, seconds = crowd(address, asks, clients)
    after = read_gauges(address.get("/metrics"))
    return {
        "seen": [each.to_json() for each in seen],
        "seconds": seconds,
        "gauges": {name: after[name] - before[name] for name in before},
    }


def order_of(clients: Sequence[int], round_number: int) -> list[int]:
    """In alternating order, so that no level is always the one that comes later."""
    return sorted(clients, reverse=round_number % 2 == 1)


Cells = dict[tuple[int, Any], dict[str, Any]]


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    clients = sorted({1, *arguments.clients})
    prompts = read_prompts(arguments.prompts)
    count = arguments.requests or max(clients)
    report.prepare_folder(arguments.out)
    machine = describe_machine()
    settings = {
        "clients": clients, "requests": count, "rounds": arguments.rounds,
        "cache_requests": arguments.cache_requests, "method": arguments.method,
        "max_tokens": LENGTHS, "server": list(options),
        "prompts": [prompt_id(prompt) for prompt in prompts],
    }  # fmt: skip
    heading = {"benchmark": "serving", "settings": settings, "machine": machine}
    journal = Journal(arguments.out, heading, say, revision=machine["revision"])
    rounds = range(arguments.rounds)
    levels = [(number, level) for number in rounds for level in order_of(clients, number)]
    own = [load_cache.distinct(prompts, arguments.cache_requests, number) for number in rounds]
    most = 2 * max(*clients, load_cache.CLIENTS)
    warm = asks_of(prompts, NUM_WARM)
    # not shared: the same prompts come in each level
    with server([*options, "--no-prefix-cache"], most, arguments.method) as address:
        card = json.loads(address.get("/v1/models"))["data"][0]
        crowd(address, warm, NUM_WARM)
        with direct(options) as twin:
            twin.measure(warm, NUM_WARM, arguments.method)
            cells = measure_levels(journal, address, twin, asks_of(prompts, count), levels)
        with server(options, most, arguments.method) as sharing:
            crowd(sharing, warm, NUM_WARM)
            shared = measure_sharing(journal, {"off": address, "on": sharing}, own)
    facts = {
        "benchmark": "serving",
        "command": shlex.join(["python", "benchmarks/serving/load.py", *sys.argv[1:]]),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": card["id"],
        "engine": card["stretto"]["engine"],
        "dtype": arguments.dtype,
        "settings": settings,
        "machine": machine,
        "definitions": DEFINITIONS,
    }
    status = tell(arguments.out, cells, shared, facts)
    journal.finish()
    return status


def tell(out: Path, cells: Cells, shared: Cells, facts: dict[str, Any]) -> int:
    """Writes the results and prints the tables and what was shown; the exit status."""
    rows, records = summary(cells)
    table, more = load_cache.summary(shared)
    met = verdicts(rows, table)
    facts = {**facts, "shown": met}
    report.save(out, rows, [*records, *more], plot(rows), facts, raw="requests", cache=table)
    for each in (rows, table):
        print(report.format_table([rounded(row, 3) for row in each]))
    for what, answer in met.items():
        say(f"{answer:>12}  {what}")
    return int(any(met[what] == NO for what in met if what.startswith(("all", "texts"))))


def measure_levels(
    journal: Journal, address: Address, twin: Direct, asks: Sequence[Ask],
    levels: Sequence[tuple[int, int]],
) -> Cells:  # fmt: skip
    """By round and number of clients, the cell of the server, with that of its twin as `direct`.
    Which of the two comes first alternates from round to round."""

    def served() -> dict[str, Any]:
        return journal.cell(
            f"{number}/{clients}", lambda: rested(lambda: measure(address, asks, clients))
        )

    def alone() -> dict[str, Any]:
        return journal.cell(
            f"{number}/{clients}/direct",
            lambda: rested(lambda: twin.measure(asks, clients, address.method)),
        )

    cells: Cells = {}
    for number, clients in levels:
        cell, own = run_pair(number, served, alone)
        cells[number, clients] = {**cell, "direct": own}
        told = f"{cell['seconds']:.1f} s, {own['seconds']:.1f} s without a server"
        say(f"round {number + 1}, {clients} clients: {told}")
    return cells


def measure_sharing(
    journal: Journal, sides: dict[str, Address], asks: Sequence[Sequence[Ask]]
) -> Cells:
    """By round and side, the cell of a server; the sides in alternating order."""
    cells: Cells = {}
    for number, own in enumerate(asks):
        for side in load_cache.SIDES[:: 1 if number % 2 == 0 else -1]:
            cells[number, side] = journal.cell(
                f"{number}/cache {side}",
                lambda at=side, own=own: rested(
                    lambda: measure(sides[at], own, load_cache.CLIENTS)
                ),
            )
        seconds = " and ".join(f"{cells[number, side]['seconds']:.1f} s" for side in sides)
        say(f"round {number + 1}, prompts not shared and shared: {seconds}")
    return cells


def read_prompts(path: Path | None) -> list[str]:
    """The lines of a file that are not empty; without one, `PROMPTS`."""
    if path is None:
        return list(PROMPTS)
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip()]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = {"type": lambda text: [int(n) for n in text.split(",")], "metavar": "N,N…"}
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--clients", default=list(CLIENTS), **numbers)
    parser.add_argument("--requests", type=int, help="of a round [default: the most clients]")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--cache-requests", type=int, default=CACHE_REQUESTS,
        help="of a round with shared prompts",
    )  # fmt: skip
    parser.add_argument("--prompts", type=Path, help="one a line [default: built in]")
    parser.add_argument("--method", default="auto", help="as in `stretto run`")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pool-slots", default=str(POOL_SLOTS))
    arguments, options = parser.parse_known_args(argv)
    if "--no-prefix-cache" in options:
        parser.error("--no-prefix-cache is one side of the second part; leave it out")
    fixed = ["--dtype", arguments.dtype, "--pool-slots", arguments.pool_slots]
    return run(arguments, [*fixed, *options])


if __name__ == "__main__":
    sys.exit(main())
