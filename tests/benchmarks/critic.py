"""`launch bench critic`: what a critic is worth where the reward comes late, in whole runs of the system.

Every run is a `launch local` with its own bus, storage, actors and learner, on the task of
tests/benchmarks/delayed_reward.py. Runs of one seed differ in their advantage alone: they begin with the
same weights after the same warm-up, on the same prompts. A run's figures are written beside its directory
when it has ended; another call goes on where this one stopped.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from statistics import fmean, median

import structlog

from benchmarks.delayed_reward import MOST_TURNS, task_files, write_task
from benchmarks.whole_runs.curves import smoothed, steps_to_target
from bus.codec import Json
from bus.errors import ConfigError, SluiceError
from bus.waiting import cancelled, ended_before
from launch.settings.run_config import Layer, RunConfig, merge, resolve
from soak.local_run import LocalRun
from storage.disk.atomic_files import read_json, write_json
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import Record, integer, number, read_records

log = structlog.get_logger()
CRITIC: Layer = {
    "level": "turn",
    "trace_decay": 0.9,
    "epochs": 2,
    "value_clip": 10.0,  # values are within 3, and have to get there in a few steps
}
OBJECTIVES: dict[str, Layer] = {
    "reinforce": {"advantage": {"type": "discounted_returns", "baseline": "none"}, "whiten_advantages": True},
    "gae": {"advantage": {"type": "gae", "trace_decay": 0.5}, "critic": CRITIC, "whiten_advantages": True},
    "gae_token": {
        "advantage": {"type": "gae", "trace_decay": 0.5},
        "critic": {**CRITIC, "level": "token"},
        "whiten_advantages": True,
    },
    "gae_vtrace": {
        "advantage": {"type": "gae", "trace_decay": 0.5},
        "critic": {**CRITIC, "targets": "vtrace"},
        "whiten_advantages": True,
    },
}
"""Sections of the learner by the name of the objective."""
WITHOUT, WITH = "reinforce", "gae"
"""The two that are compared: the return of every turn, and the same less what a critic foresaw."""
EPISODES_PER_STEP = 32
"""Each of a prompt of its own, so that no sibling tells what luck gave."""
EVALUATED_EVERY = 10
"""Versions from one evaluation to the next."""
LAST_SHARE = 0.2
"""Share of the steps, at the end, over which the last figures are means."""
MARK = 0.9
"""Held-out share of right answers whose first step is told; the demonstrations have 0.5."""
END_S = 120.0
REMEDY = "remove it; a run whose figures are missing goes on from its checkpoint"


@dataclass(frozen=True)
class Plan:
    """Says which runs there are."""

    directory: Path
    """Place of all runs and of their figures."""
    seeds: int = 3
    objectives: tuple[str, ...] = (WITHOUT, WITH)
    steps: int = 100
    warmup_steps: int = 100
    """Steps on demonstrations, before reinforcement learning."""
    turns: int = 4
    parallel: int = 1
    """Runs at a time; each keeps two processors busy."""
    lr: float = 5e-4
    critic_lr: float = 2e-3

    def __post_init__(self) -> None:
        if unknown := [name for name in self.objectives if name not in OBJECTIVES]:
            raise ConfigError(f"--objectives {unknown[0]}: there are {', '.join(OBJECTIVES)}")
        for flag, value in (("seeds", self.seeds), ("steps", self.steps), ("parallel", self.parallel)):
            if value < 1:
                raise ConfigError(f"--{flag} {value}: it is 1 at least")
        if not 1 <= self.turns <= MOST_TURNS:
            raise ConfigError(f"--turns {self.turns}: an episode has 1 to {MOST_TURNS}")

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Return objective and seed of every run, seed by seed."""
        return [(objective, seed) for seed in range(self.seeds) for objective in self.objectives]


def configuration(plan: Plan, objective: str, seed: int) -> RunConfig:
    """Return the settings of a run."""
    task = task_files(plan.directory, seed)
    return resolve({
        "run": f"{objective}-{seed}",
        "directory": plan.directory,
        "seed": seed,
        "data": {"prompts": task.prompts, "heldout": task.heldout},
        "admission": {
            "groups_per_step": EPISODES_PER_STEP, "samples_per_prompt": 1, "max_staleness": 1,
        },
        "sampling": {"max_new_tokens": 2},
        "model": {
            "dtype": "float32",
            "scratch": {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 2},
        },
        "warmup": {
            "demonstrations": task.demonstrations,
            "steps": plan.warmup_steps,
            "optimizer": {"lr": 2e-3, "warmup_steps": 10},
        },
        "learner": {
            "steps": plan.steps,
            "publish_dtype": "float32",
            "optimizer": {"lr": plan.lr, "warmup_steps": 5},
            "checkpoint": {"save_every": 50},
            **_objective(plan, objective),
        },
        "evaluation": {"every_versions": EVALUATED_EVERY},
        "actors": {
            "environment": {
                "type": "plugin",
                "environment": "benchmarks.delayed_reward:DelayedReward",
                "settings": {"turns": plan.turns},
            },
            "groups_at_once": EPISODES_PER_STEP,
        },
    })  # fmt: skip


def _objective(plan: Plan, name: str) -> Layer:
    sections = OBJECTIVES[name]
    if "critic" not in sections:
        return sections
    return merge(sections, {"critic": {"optimizer": {"lr": plan.critic_lr, "warmup_steps": 5}}})


async def bench_critic(plan: Plan, stop: asyncio.Event) -> dict[str, Json]:
    """Run what has not run yet, and return the figures of all runs.

    On `stop` the runs under way end with a checkpoint, and the report is of those that were complete. Raises
    `SluiceError` when a run gives up.
    """
    for seed in range(plan.seeds):  # before the runs of a seed read them at the same time
        await asyncio.to_thread(write_task, plan.directory, turns=plan.turns, seed=seed)
    await asyncio.to_thread(_refuse_other_plan, plan)
    slots = asyncio.Semaphore(plan.parallel)
    found: dict[str, dict[str, Json]] = {}

    async def one(objective: str, seed: int) -> None:
        async with slots:
            if not stop.is_set() and (figures := await _figures(plan, objective, seed, stop)) is not None:
                found[f"{objective}-{seed}"] = figures

    try:
        async with asyncio.TaskGroup() as tasks:
            for objective, seed in plan.runs:
                tasks.create_task(one(objective, seed), name=f"run {objective}-{seed}")
    except* SluiceError as failed:
        raise SluiceError("; ".join(str(error) for error in failed.exceptions)) from failed
    return report(plan, found)


def _refuse_other_plan(plan: Plan) -> None:
    """Raise `ConfigError` when a run of that name has had other settings."""
    for objective, seed in plan.runs:
        config = configuration(plan, objective, seed)
        given = plan.directory / f"{config.run}.json"
        settings = json.loads(config.model_dump_json(exclude={"bus"}))
        if given.exists() and read_json(given, REMEDY) != settings:
            raise ConfigError(f"{given} is of another plan: give another --directory, or move it away")


async def _figures(plan: Plan, objective: str, seed: int, stop: asyncio.Event) -> dict[str, Json] | None:
    """Return the figures of a run, which an earlier call may have written; None if `stop` came first."""
    config = await asyncio.to_thread(configuration, plan, objective, seed)
    given = plan.directory / f"{config.run}.json"
    figures = plan.directory / f"{config.run}.figures.json"
    settings = json.loads(config.model_dump_json(exclude={"bus"}))
    if not figures.exists():
        await asyncio.to_thread(write_json, given, settings)
        if not await _run(config, given, stop):
            return None
        await asyncio.to_thread(write_json, figures, figures_of(RunDirectory(config.directory, config.run)))
    return dict(await asyncio.to_thread(read_json, figures, REMEDY))


async def _run(config: RunConfig, given: Path, stop: asyncio.Event) -> bool:
    """Run to the end, or go on with it; return False if `stop` came before that."""
    local = LocalRun(
        RunDirectory(config.directory, config.run), ("--config", str(given)), log_name=f"{config.run}.log"
    )
    log.info("run_begins", run=config.run, log=str(local.log))
    await local.start()
    process = local.process
    if process is None:
        raise RuntimeError("`start` has left no process")
    ending = asyncio.create_task(process.wait())
    try:
        if not await ended_before(stop, ending):
            await cancelled(ending)
            await local.end(END_S)
            return False
    finally:
        await local.kill(patience_s=0)
    if process.returncode != os.EX_OK:
        raise SluiceError(f"run {config.run} gave up with status {process.returncode}: see {local.log}")
    log.info("run_ends", run=config.run)
    return True


def figures_of(run: RunDirectory) -> dict[str, Json]:
    """Return what a run has come to, from its record.

    Raises `SluiceError` for one without a step or an evaluation."""
    steps: dict[int, Record] = {}
    evaluations: dict[int, Record] = {}
    for record in read_records(run.metrics):
        if record.get("train/stage") == "rl":
            steps[integer(record, "step")] = record  # one trained again counts as it was the last time
        elif record.get("kind") == "evaluation":
            evaluations[integer(record, "step")] = record
    if not steps or not evaluations:
        raise SluiceError(f"{run.metrics} has {len(steps)} steps and {len(evaluations)} evaluations")
    records = [steps[step] for step in sorted(steps)]
    evaluated = sorted(evaluations)
    right = [number(evaluations[step], "sampled") for step in evaluated]
    reached = steps_to_target(evaluated, smoothed(right), MARK)
    late = (1 - LAST_SHARE) * max(steps)
    last = [value for step, value in zip(evaluated, right, strict=True) if step >= late] or right[-1:]
    explained = [
        number(record, "critic/explained_variance")
        for step, record in steps.items()
        if step > late and "critic/explained_variance" in record
    ]
    return {
        "steps": len(records),
        "right_first": right[0],
        "right_last": fmean(last),
        "steps_to_mark": None if isnan(reached) else round(reached, 1),
        "explained_variance": fmean(explained) if explained else None,
        "step_s": median(number(record, "time/step_s") for record in records),
        "seconds": number(records[-1], "time_s") - number(records[0], "time_s"),
        "evaluated_steps": [*evaluated],
        "right": [round(value, 4) for value in right],
    }


def report(plan: Plan, found: Mapping[str, Mapping[str, Json]]) -> dict[str, Json]:
    """Return the figures of all complete runs, their means by objective, and who was ahead in each seed."""
    means: dict[str, Json] = {}
    for objective in plan.objectives:
        runs = [run for seed in range(plan.seeds) if (run := found.get(f"{objective}-{seed}"))]
        if runs:
            means[objective] = {
                "runs": len(runs),
                "right_last": fmean(number(run, "right_last") for run in runs),
                "steps_to_mark": [run["steps_to_mark"] for run in runs],
            }
    ahead = [
        number(found[f"{WITH}-{seed}"], "right_last") - number(found[f"{WITHOUT}-{seed}"], "right_last")
        for seed in range(plan.seeds)
        if {f"{WITH}-{seed}", f"{WITHOUT}-{seed}"} <= found.keys()
    ]
    return {
        "turns": plan.turns,
        "steps": plan.steps,
        "mark": MARK,
        "complete": len(found) == len(plan.runs),
        "objectives": means,
        "gae_less_reinforce": [*ahead],
        "gae_wins": sum(difference > 0 for difference in ahead),
        "runs": {name: dict(found[name]) for name in sorted(found)},
    }


def table(found: Mapping[str, Json]) -> str:
    """Return the runs of a report as lines for a terminal."""
    head = ("run", "first", "last", f"to {MARK}", "explained", "s/step")
    runs = found["runs"]
    rows = [head, *(_row(name, run) for name, run in runs.items() if isinstance(run, dict))]  # type: ignore[union-attr]
    return "\n".join("".join(f"{row[0]:<16}") + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows)


def _row(name: str, run: Mapping[str, Json]) -> tuple[str, ...]:
    mark, explained = run["steps_to_mark"], run["explained_variance"]
    return (
        name,
        *(f"{number(run, f'right_{part}'):.3f}" for part in ("first", "last")),
        "-" if mark is None else f"{number(run, 'steps_to_mark'):.0f}",
        "-" if explained is None else f"{number(run, 'explained_variance'):.2f}",
        f"{number(run, 'step_s'):.2f}",
    )
