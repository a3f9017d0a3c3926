"""Which sizes, steps and rates does a tiny model need to solve the problems? A few minutes each.

    python benchmarks/tip/pilot.py --arm dense,tip --lr 1e-3,2e-3 --minutes 10 --work build/pilot
    python benchmarks/tip/pilot.py --phase 6-10:0.3 --phase 12-24:0.7 --batch 16 --work build/pilot

Trains each arm at each rate and, a few times on the way, answers problems of the validation split
greedily. Prints a line each time, and writes all into `WORK/pilot.jsonl`; what the stages then use
is written into `stages.py` by hand. `--phase SIZES:SHARE` is a curriculum: shares of all steps.
The number of steps is made of `--minutes` and `--tokens-per-s`. Models are kept, to try
`stretto train grpo` on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from answers import decode, slots_for

from stretto.data.labels import Labels
from stretto.data.registers import max_live
from stretto.lm import LM
from stretto.models.tiny import make_tiny
from stretto.problems import ALPHABET, Problem, parse_sizes, problems
from stretto.train import Batch, Supervised
from stretto.train.examples import Example
from stretto.train.optimizer import MasterAdamW
from stretto.train.schedule import Schedule
from stretto.train.trainee import Trainee

REGISTERS, SLACK, IN_TURN = 8, 4, 4
BETAS = (0.9, 0.999)
ARMS = {
    "dense": Labels("none"),
    "tip": Labels("liveness", REGISTERS, slack=SLACK),
    "in-turn": Labels("round-robin", IN_TURN),
}


@dataclass(frozen=True)
class Task:
    """What problems are drawn from, without end and each once."""

    tasks: Sequence[str]
    sizes: tuple[int, int]

    def problem(self, number: int) -> Problem:
        """The problem of a number: tasks and sizes in turn."""
        index, place = divmod(number, len(self.tasks))
        (found,) = problems(self.tasks[place], self.sizes, 1, split="train", start=index)
        return found


class Examples:
    """Examples of an arm, made as they are asked for."""

    def __init__(self, trainee: Trainee, labels: Labels) -> None:
        self._maker = trainee.maker()
        self._encode = trainee.encode_prompt
        self._labels = labels

    def of(self, problem: Problem) -> Example | None:
        """None where the problem needs more registers than there are."""
        if max_live(problem.reads) > REGISTERS:
            return None
        found = problem.labelled(self._labels)
        if found is None:
            return None
        return self._maker.from_annotated(self._encode(problem.prompt), found.annotated)


@dataclass(frozen=True)
class Plan:
    """One run: phases as (problems, share of the steps), and how it steps."""

    arm: str
    lr: float
    phases: Sequence[tuple[Task, float]]
    batch: int
    tokens: int
    shape: str
    seed: int
    looks: int
    valid: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.lr:g}-{self.batch}-{self.seed}"


def pilot(plan: Plan, journal: Path, folder: Path) -> None:
    """Trains, looks at it `looks` times, and saves it."""
    torch.manual_seed(plan.seed)
    dialect, settings = ("plain", {}) if plan.arm == "dense" else ("tip", {"num_registers": 8})
    trainee = make_tiny(
        plan.shape, list(ALPHABET), dialect=dialect, settings=settings, seed=plan.seed
    )
    examples = Examples(trainee, ARMS[plan.arm])
    named = {n: p for n, p in trainee.model.named_parameters() if p.requires_grad}
    optimizer = MasterAdamW(named, betas=BETAS)
    schedule, began, number, losses, seen = Schedule(plan.lr, "cosine", 0.03), 0.0, 0, [], 0
    began, looked = time.perf_counter(), 0
    trainee.model.train()
    step = 0
    while seen < plan.tokens:
        found: list[Example] = []
        while len(found) < plan.batch:
            example = examples.of(_phase(plan, seen).problem(number))
            number += 1
            found += [] if example is None else [example]
        outcome = Supervised(found).outcome(trainee.model, Batch.of(found))
        outcome.loss.backward()
        optimizer.collect()
        optimizer.normalise(outcome.num_terms, 1.0)
        optimizer.update(schedule.lr_at(seen, plan.tokens), step)
        losses.append(float(outcome.loss.detach()) / outcome.num_terms)
        seen, step = seen + sum(map(len, found)), step + 1
        if seen * plan.looks >= plan.tokens * (looked + 1) or seen >= plan.tokens:
            looked += 1
            seconds = time.perf_counter() - began
            line = {"run": plan.name, "step": step, "examples": number, "tokens": seen}
            line |= {"seconds": round(seconds, 1), "loss": round(statistics.fmean(losses), 4)}
            _tell(line | look(trainee, plan), journal)
            losses = []
            trainee.model.train()
            began += time.perf_counter() - began - seconds  # looking is not training
    if not folder.exists():
        trainee.save(folder)


def _phase(plan: Plan, seen: int) -> Task:
    share = 0.0
    for task, own in plan.phases:
        share += own
        if seen < share * plan.tokens:
            return task
    return plan.phases[-1][0]


def look(trainee: Trainee, plan: Plan) -> dict[str, Any]:
    """Greedy answers to problems of the validation split, by task: percent right, live tokens."""
    trainee.model.eval()
    last = plan.phases[-1][0]
    found = {t: list(problems(t, last.sizes, plan.valid, split="valid")) for t in last.tasks}
    slots = slots_for([p for own in found.values() for p in own], plan.valid)
    lm = LM.wrap(
        trainee.model, trainee.tokenizer, card=trainee.card, engine="auto", pool_slots=slots
    )
    told: dict[str, Any] = {}
    for task, own in found.items():
        rows, seconds = decode(lm, own, lambda _: "auto", task)
        told[task] = round(100 * statistics.fmean(row.is_right for row in rows), 1)
        told[f"{task}_live"] = round(statistics.fmean(row.generated_mean for row in rows), 1)
        told[f"{task}_seconds"] = round(seconds, 1)
    return told


def _tell(line: dict[str, Any], journal: Path) -> None:
    print(json.dumps(line), flush=True)
    with journal.open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", default="dense,tip", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--lr", default="1e-3")
    parser.add_argument("--phase", action="append", metavar="SIZES:SHARE")
    parser.add_argument("--tasks", default="program,tree,chain")
    parser.add_argument("--shape", default="tiny-1m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--tokens-per-s", type=float, default=12_000)
    parser.add_argument("--looks", type=int, default=5)
    parser.add_argument("--valid", type=int, default=39, help="problems of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, required=True)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    tasks = given.tasks.split(",")
    phases = []
    for text in given.phase or ["6-10:0.3", "12-24:0.7"]:
        sizes, _, share = text.partition(":")
        phases.append((Task(tasks, parse_sizes(sizes)), float(share)))
    for arm in given.arm.split(","):
        for lr in map(float, given.lr.split(",")):
            plan = Plan(
                arm=arm,
                lr=lr,
                phases=phases,
                batch=given.batch,
                tokens=round(60 * given.minutes * given.tokens_per_s),
                shape=given.shape,
                seed=given.seed,
                looks=given.looks,
                valid=given.valid,
            )
            pilot(plan, given.work / "pilot.jsonl", given.work / plan.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
