"""`train grpo`: a model and problems in, a model that solves them with less KV out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.data.rows import Reject
from stretto.data.settings import hold_folder_to
from stretto.data.store import Store
from stretto.errors import InvalidInput, Unsupported
from stretto.files import write_atomically
from stretto.train.grpo_config import GrpoConfig
from stretto.train.grpo_parts import (
    identity_of,
    loop_settings,
    loss_settings,
    open_for,
    problems_of,
    requests_of,
    step_settings,
)
from stretto.train.grpo_policy import PolicyRuntime, pool_slots_for
from stretto.train.grpo_problems import Problems
from stretto.train.grpo_rollouts import Interrupted, Roller
from stretto.train.grpo_steps import GrpoSteps
from stretto.train.grpo_valid import best_step, greedy_validation
from stretto.train.loop import METRICS, Finished, Loop, Report, lines_of
from stretto.train.prefer_run import switch_off_dropout
from stretto.train.saved import is_saved

if TYPE_CHECKING:
    from stretto.train.trainee import Trainee

CONFIG, ENVIRONMENT, REJECTS, SUMMARY = (
    "config.json", "environment.json", "rejects.jsonl", "summary.json",
)  # fmt: skip
LONGEST_PROMPTS = 16
"""By their characters: of these the tokens are counted, to tell how large a pool is wanted."""


@dataclass(frozen=True)
class GrpoHooks:
    """What a run tells while it works, and whether it is to stop. `report_rollouts` is told how
    many of a step's answers are done, and of how many."""

    report: Report | None = None
    report_rollouts: Callable[[int, int], None] | None = None
    should_stop: Callable[[], bool] | None = None


NO_HOOKS = GrpoHooks()


def train_grpo(config: GrpoConfig, *, hooks: GrpoHooks = NO_HOOKS) -> dict[str, Any]:
    """Trains and saves a model; the summary, which is also written to the run's folder.

    The folder `config.out` gets the settings, the environment, `metrics.jsonl`, `rollouts/` and
    `valid/` with a file a step, `checkpoints/`, `rejects.jsonl`, `best-STEP/` and, at the end,
    `model/`. The same settings over the same folder go on where it stopped. Raises `InvalidInput`
    before anything is drawn if settings or problems do not fit, and `Unsupported` for several
    processes.
    """
    if config.out is None:
        raise InvalidInput("no folder for the run; name one with --out")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise Unsupported("GRPO draws and trains in one process; start it without torchrun")
    return Run(config, Path(config.out).expanduser(), hooks).go()


@dataclass
class Run:
    """A run, from its settings to its summary."""

    config: GrpoConfig
    out: Path
    hooks: GrpoHooks
    rejects: dict[str, Reject] = field(default_factory=dict)

    def go(self) -> dict[str, Any]:
        config = self.config
        problems, held_out = problems_of(config)
        trainee = open_for(config)
        maker = trainee.maker()
        maker.check_answers()
        switch_off_dropout(trainee.model)
        identity = identity_of(config, problems, held_out)
        hold_folder_to(self.out, CONFIG, {**config.resolved, **identity})
        self._write_environment()
        policy = self._policy(trainee, problems, held_out)
        steps = GrpoSteps(
            trainee.model,
            maker,
            trainee.encode_prompt,
            roller=self._roller(policy, problems, "rollouts"),
            settings=step_settings(config),
            rewards=config.rewards(),
            loss=loss_settings(config),
        )
        validation = None
        if held_out is not None:
            roller = self._roller(policy, held_out, "valid")
            validation = greedy_validation(roller, steps, config.rewards())
        loop = Loop(
            trainee.model,
            steps,
            steps,
            loop_settings(config, identity),
            self.out,
            validation=validation,
            report=lambda line: self._report(trainee, line),
            should_stop=self.hooks.should_stop,
        )
        try:
            finished = loop.run()
        except Interrupted:
            finished = Finished(steps.num_updates_done, False, {}, None)
        return self._finish(trainee, finished)

    # -- parts ---------------------------------------------------------------------------------

    def _policy(
        self, trainee: Trainee, problems: Problems, held_out: Problems | None
    ) -> PolicyRuntime:
        config = self.config
        every = [*problems.items, *(() if held_out is None else held_out.items)]
        prompts = sorted((item.prompt for item in every), key=len)[-LONGEST_PROMPTS:]
        longest = max(len(trainee.encode_prompt(prompt)) for prompt in prompts)
        num = config.prompts_per_step * config.samples
        slots = config.pool_slots
        if slots is None:
            slots = pool_slots_for(min(num, requests_of(config)), longest + config.max_tokens)
        return PolicyRuntime(trainee, engine=config.engine, pool_slots=slots)

    def _roller(self, policy: PolicyRuntime, problems: Problems, name: str) -> Roller:
        return Roller(
            policy=policy,
            problems=problems,
            folder=self.out / name,
            max_tokens=self.config.max_tokens,
            requests=requests_of(self.config, policy.engine),
            seed=self.config.seed,
            reject=self._reject,
            should_stop=self.hooks.should_stop,
            report=self.hooks.report_rollouts,
        )

    def _reject(self, row: Reject) -> None:
        """Keeps a problem that cannot be answered, once."""
        own = row.model_copy(update={"sample": 0})
        if own.key in self.rejects:
            return
        with Store(self.out / REJECTS, Reject) as store:
            if own.key not in store:
                store.add(own)
            self.rejects = dict(store.rows)

    def _write_environment(self) -> None:
        from stretto.train.environment import environment

        facts = json.dumps(environment(self.config.device), indent=2) + "\n"
        write_atomically(self.out / ENVIRONMENT, facts.encode())

    # -- what is told and kept -----------------------------------------------------------------

    def _report(self, trainee: Trainee, line: Mapping[str, Any]) -> None:
        if line["kind"] == "valid":
            self._keep_if_best(trainee, int(line["step"]))
        if self.hooks.report is not None:
            self.hooks.report(line)

    def best(self) -> int | None:
        config = self.config
        lines = lines_of(self.out / METRICS)
        by_kv = config.kv_weight > 0
        return best_step(lines, tolerance=config.valid_tolerance, by_kv=by_kv)

    def _keep_if_best(self, trainee: Trainee, step: int) -> None:
        folder = self._best_folder(step)
        if self.best() != step or folder.exists():
            return
        before = [path for path in self.out.glob("best-*") if path.is_dir()]
        trainee.save(folder)
        for path in before:
            shutil.rmtree(path, ignore_errors=True)

    def _best_folder(self, step: int) -> Path:
        return self.out / f"best-{step:08d}"

    def _finish(self, trainee: Trainee, finished: Finished) -> dict[str, Any]:
        folder, best = self.out / "model", self.best()
        lines = [line for line in lines_of(self.out / METRICS) if line["kind"] == "valid"]
        summary: dict[str, Any] = {
            "out": str(self.out),
            "model": None,
            "best": None,
            "best_step": best,
            "updates": finished.num_steps,
            "is_complete": finished.is_complete,
            "trained_parameters": trainee.num_trained,
            "rejected": len(self.rejects),
            "last": _plain(finished.metrics),
            "valid": _plain(lines[-1]) if lines else None,
            "best_valid": next((_plain(x) for x in lines if x["step"] == best), None),
        }
        if best is not None:
            summary["best"] = str(self._best_folder(best))
        if finished.is_complete:
            summary["model"] = str(folder)
            if not is_saved(folder):
                trainee.save(folder)
        write_atomically(self.out / SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())
        return summary


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    left_out = (
        "kind", "step", "of", "seconds", "tokens", "num_packs", "lr", "grad_norm",
        "sample_seconds", "sample_tokens_per_s",
    )  # fmt: skip
    return {name: value for name, value in metrics.items() if name not in left_out}
