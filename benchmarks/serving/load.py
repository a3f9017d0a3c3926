"""What `stretto serve` does under load: clients in this process, the server in another, loopback.

    python benchmarks/serving/load.py --out benchmarks/results/serving

The same requests, of mixed lengths, are asked for by 1, 4, 16 and 64 clients at once, in several
rounds. Told of each: whether all got an end and the text that one client alone gets, how long they
waited, tokens per second, and what the server costs beside the engine. Further options are
`stretto serve`'s. Cells are kept as they come: the same command goes on where it was killed.
The exit status is 1 if a request got no end or another text.
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

from load_client import LENGTHS, Address, asks_of, crowd
from load_figures import DEFINITIONS, plot, read_gauges, summary, verdicts

from stretto.bench import report
from stretto.bench.journal import Journal
from stretto.bench.machine import describe_machine
from stretto.bench.pairs import rounded
from stretto.data.rows import prompt_id

CLIENTS = (1, 4, 16, 64)
ROUNDS = 3
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


def measure(address: Address, prompts: Sequence[str], count: int, clients: int) -> dict[str, Any]:
    """A cell: what each request saw, the seconds of all, and what the server's gauges grew by."""
    before = read_gauges(address.get("/metrics"))
    seen, seconds = crowd(address, asks_of(prompts, count), clients)
    after = read_gauges(address.get("/metrics"))
    return {
        "seen": [each.to_json() for each in seen],
        "seconds": seconds,
        "gauges": {name: after[name] - before[name] for name in before},
    }


def order_of(clients: Sequence[int], round_number: int) -> list[int]:
    """In alternating order, so that no level is always the one that comes later."""
    return sorted(clients, reverse=round_number % 2 == 1)


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    clients = sorted({1, *arguments.clients})
    prompts = read_prompts(arguments.prompts)
    count = arguments.requests or max(clients)
    report.prepare_folder(arguments.out)
    machine = describe_machine()
    settings = {
        "clients": clients, "requests": count, "rounds": arguments.rounds,
        "method": arguments.method, "max_tokens": LENGTHS, "server": list(options),
        "prompts": [prompt_id(prompt) for prompt in prompts],
    }  # fmt: skip
    journal = Journal(
        arguments.out, {"benchmark": "serving", "settings": settings, "machine": machine}, say,
        revision=machine["revision"],
    )  # fmt: skip
    cells: dict[tuple[int, int], dict[str, Any]] = {}
    with server(options, 2 * max(clients), arguments.method) as address:
        card = json.loads(address.get("/v1/models"))["data"][0]
        crowd(address, asks_of(prompts, min(4, max(clients))), 4)  # to warm up
        for number in range(arguments.rounds):
            for level in order_of(clients, number):
                cells[number, level] = journal.cell(
                    f"{number}/{level}", lambda at=level: measure(address, prompts, count, at)
                )
                cell = cells[number, level]
                say(f"round {number + 1}, {level} clients: {cell['seconds']:.1f} s")
    rows, records = summary(cells)
    met = verdicts(rows)
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
        "shown": met,
    }
    report.save(arguments.out, rows, records, plot(rows), facts, raw="requests")
    journal.finish()
    print(report.format_table([rounded(row, 3) for row in rows]))
    for what, is_met in met.items():
        say(f"{'yes' if is_met else 'NO '}  {what}")
    return 0 if met["all finished"] and met["texts as alone"] else 1


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
    parser.add_argument("--prompts", type=Path, help="one a line [default: built in]")
    parser.add_argument("--method", default="auto", help="as in `stretto run`")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pool-slots", default=str(POOL_SLOTS))
    arguments, options = parser.parse_known_args(argv)
    fixed = ["--dtype", arguments.dtype, "--pool-slots", arguments.pool_slots]
    fixed.append("--no-prefix-cache")  # the same prompts come in each level
    return run(arguments, [*fixed, *options])


if __name__ == "__main__":
    sys.exit(main())
