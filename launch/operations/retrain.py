"""`launch retrain` and `launch restore`: looking back at a run from its directory alone, without a bus."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

import structlog

from bus.codec import Json
from bus.errors import ConfigError
from bus.trajectory import Trajectory
from launch.run_view.run_files import recorded_config
from launch.services.learner import learner_settings
from launch.settings.run_config import RunConfig, resolve
from launch.trajectories.stored_groups import open_stores
from storage.client.score_tables import load_scores, scores_path
from storage.disk.run_directory import RunDirectory
from storage.store.archive import restore
from storage.store.replay import ReplayStore

if TYPE_CHECKING:
    from learner.config.process_settings import LearnerSettings
    from learner.initial.initial import Initial

log = structlog.get_logger()


async def retrain(
    run: RunDirectory, config: RunConfig, overrides: Mapping[str, Any], steps: tuple[int, int | None],
    stop: asyncio.Event, *, scores: str | None = None,
) -> dict[str, Json]:  # fmt: skip
    """Train the steps after the first of `steps` up to the last (None: the newest) again, and compare.
    `overrides` change the objective of these steps, and `scores`, a table of `launch rescore`, their rewards.
    On `stop` the report is of the steps done. Raises what `learner.history.retrain.retrain_steps` does."""
    changed = resolve(config.model_dump(), overrides)
    reward = None if scores is None else scored_by(run, scores)
    report = await asyncio.to_thread(_retrain, run, config, changed, steps, stop, reward)
    changes = report["changed"]
    if scores is not None and isinstance(changes, dict):
        changes["scores"] = scores
    return report


def scored_by(run: RunDirectory, name: str) -> Callable[[Trajectory], float]:
    """Return the rewards of a score table; `ConfigError` for a table, or a trajectory in it, that is
    missing."""
    scores = load_scores(scores_path(run.path, name))

    def reward(trajectory: Trajectory) -> float:
        found = scores.get((trajectory.lease_id, trajectory.sample))
        if found is None:
            raise ConfigError(
                f"score table {name} lacks {trajectory.trajectory_id}: let `launch rescore` score these steps"
            )
        return found

    return reward


def _retrain(
    run: RunDirectory, config: RunConfig, changed: RunConfig, steps: tuple[int, int | None],
    stop: asyncio.Event, reward: Callable[[Trajectory], float] | None,
) -> dict[str, Json]:  # fmt: skip
    from learner.backends.contract.backend import Backend
    from learner.history.retrain import largest_difference, last_step, retrain_steps, summary, weights_at

    began = time.monotonic()
    settings, _ = learner_settings(config, run)
    used, _ = learner_settings(changed, run)  # with micro-batches that fit the host
    from_step, to_step = steps[0], last_step(settings) if steps[1] is None else steps[1]
    if not 0 <= from_step < to_step:
        raise ConfigError(
            f"from step {from_step} to {to_step} there is nothing to train: the first step is the one after "
            "--from-step, the last --to-step"
        )
    changes = _differences(config.learner.model_dump(mode="json"), changed.learner.model_dump(mode="json"))
    done, apart = [], None
    with as_then(run, config) as (settings, initial, stores):

        def compare(backend: Backend) -> None:
            nonlocal apart
            then = None if changes or reward else weights_at(settings, initial, to_step)
            apart = None if then is None else largest_difference(backend.export(), then)

        for step in retrain_steps(
            settings,
            initial,
            stores,
            from_step=from_step,
            to_step=to_step,
            changed=used.learner,
            reward=reward,
            at_end=compare,
        ):
            done.append(step)
            log.info("step_retrained", step=step.step, loss=step.loss, recorded=step.recorded_loss)
            if stop.is_set():
                break
    found = summary(done)
    return {
        "run": run.name,
        "from_step": from_step,
        "to_step": to_step,
        "changed": {f"learner.{key}": value for key, value in changes.items()},
        "weights_max_abs_diff": finite(apart),
        **{key: finite(value) for key, value in found.items()},
        "seconds": time.monotonic() - began,
    }


def ask_witness(run: RunDirectory, config: RunConfig, lease: int | None) -> dict[str, Json]:
    """Return what the weights of a checkpoint tell of how often a group was trained on (None: a recent one).
    Raises what `learner.history.witness.witness` does."""
    from learner.history.witness import newest_witness, witness

    with as_then(run, config) as (settings, initial, stores):
        found = witness(
            settings, initial, stores, newest_witness(settings, stores) if lease is None else lease
        )
    differences: dict[str, Json] = {times: finite(value) for times, value in found.differences.items()}
    return {
        "run": run.name,
        "lease": found.lease,
        "step": found.step,
        "checkpoint": found.checkpoint,
        "trained": found.trained,
        "weights_max_abs_diff": differences,
    }


@contextmanager
def as_then(
    run: RunDirectory, config: RunConfig
) -> Iterator[tuple["LearnerSettings", "Initial", list[ReplayStore]]]:
    """Yield what the run was trained with and from, in a world of this process alone."""
    from learner.backends.factory import close_world, init_world
    from learner.initial.initial import prepare

    settings, demonstrations = learner_settings(config, run)
    initial = prepare(settings, demonstrations)
    init_world()
    try:
        with open_stores(run, config.replay.shards) as stores:
            yield settings, initial, stores
    finally:
        close_world()


def retrain_status(report: Mapping[str, Json]) -> int:
    """0 unless a batch was another than then, although nothing was changed."""
    return 0 if report["changed"] or report["batches"] == report["batches_equal"] else 1


def verdict(report: Mapping[str, Json]) -> str:
    """Return what a report says, in a few lines of which the last is the verdict."""
    steps, first = report["steps"], report["first_step_that_differs"]
    assert isinstance(steps, list)
    lines = [
        f"run {report['run']}: {len(steps)} steps after step {report['from_step']} trained again in "
        f"{report['seconds']:.0f} s (--json shows each)"
    ]
    if isinstance(changed := report["changed"], dict) and changed:
        lines += [f"with {key}: {json.dumps(value)}" for key, value in changed.items()]
    lines.append(f"batches equal to those recorded: {report['batches_equal']} of {report['batches']}")
    lines.append(
        f"largest difference: {report['loss_max_abs_diff']} in the loss, "
        f"{report['grad_norm_max_abs_diff']} in the gradient's norm"
        + ("" if first is None else f"; the first step that differs is {first}")
    )
    if retrain_status(report):
        lines.append("OTHER BATCHES: the run's directory does not hold what was trained on")
    elif first is None:
        lines.append("THE SAME: every step came out as it was recorded")
    else:
        lines.append("OTHER RESULTS from the same batches" if changed else "OTHER RESULTS without a change")
    return "\n".join(lines)


def restore_run(run: RunDirectory, archive: str | None) -> list[str]:
    """Bring back every segment that was retired into `archive` (None: the run's own); return the paths.
    Raises `ConfigError` when the run has no archive, `StorageError` while its storage is up, or naming what
    the archive does not hold whole."""
    config = recorded_config(run)
    archive = archive or config.replay.archive
    if archive is None:
        raise ConfigError(f"run {run.name!r} has no replay.archive: give its place with --archive")
    found = []
    for shard in range(config.replay.shards):
        directory = run.replay(shard)
        names = restore(directory, f"{archive.rstrip('/')}/{run.name}")
        found += [str(directory / name) for name in names]
    return found


def _differences(before: Mapping[str, Json], after: Mapping[str, Json]) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            found |= {f"{key}.{inner}": v for inner, v in _differences(old, value).items()}
        elif value != old:
            found[key] = value
    return found


def finite(value: Json) -> Json:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value
