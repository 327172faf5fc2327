"""The learner processes of a run: its own, those of further policies, and shadows."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from bus.connection.bus import Bus
from bus.errors import BusAwayError, ConfigError
from bus.process.process_tuning import no_collections
from bus.waiting import unless
from launch.process.run_connection import are_announced, connected, joined
from launch.run_view.run_files import RunFiles, changed_settings, told_changes
from launch.services.first_weights import first_model
from launch.settings.run_config import RunConfig, policy_config
from learner.config.parallel import WorldConfig
from storage.built_in_tasks.generators import generate_task
from storage.disk.atomic_files import one_at_a_time, write_file
from storage.disk.run_directory import RunDirectory
from storage.metrics.spans import traced

if TYPE_CHECKING:
    from learner.config.process_settings import LearnerSettings


log = structlog.get_logger()
OTHERS = "storage announced other settings before the model was to be built"


async def serve_policy_learner(
    where: RunConfig, overrides: dict[str, Any], policy: str, stop: asyncio.Event, *, is_rank: bool
) -> WorldConfig | None:
    """Do what `serve_learner` does for a further policy of the run. Raises `ConfigError` for a policy that
    the run does not train."""
    async with connected(where, "learner", stop) as bus:
        config = await joined(bus, where, {}, stop)
    if config is None:
        return None
    own = policy_config(config, policy)
    place = {"run": own.run, "bus": own.bus, "monitoring": where.monitoring, "allow": where.allow}
    return await serve_learner(where.model_copy(update=place), overrides, stop, is_rank=is_rank)


async def serve_learner(
    where: RunConfig, overrides: dict[str, Any], stop: asyncio.Event, *, is_rank: bool
) -> WorldConfig | None:
    """Run the run's learner, or one rank of it, until it is done or `stop`. Where the run wants several ranks
    and this is none of them, it returns at once what they are to be."""
    async with connected(where, "learner", stop) as bus:
        while (config := await joined(bus, where, overrides, stop)) is not None:
            bus.state.wait_for("its model and optimizer to be built")
            world = config.learner.world
            if world.processes * world.nodes > 1 and not is_rank:
                return world
            directory = RunDirectory(config.directory, config.run)
            log.info("learner_starting", run=config.run)
            if await _train(bus, where, config, directory, stop):
                break
            if is_rank:  # the others have to join again, too
                raise BusAwayError(f"run {config.run!r}: {OTHERS}: start the learner again")
            log.info("learner_joins_again", reason=OTHERS)
        return None


async def _train(
    bus: Bus, where: RunConfig, config: RunConfig, directory: RunDirectory, stop: asyncio.Event
) -> bool:
    """Train; return whether the settings were the run's still when its model was to be built."""
    with no_collections():
        from learner.run.service import run

    def record() -> None:  # not before: a learner that is refused has trained nothing
        before = RunFiles(directory.path, lenient=True).learner_settings
        if changed := changed_settings(before, config):
            log.info("settings_changed", since_last_start=told_changes(changed))
        write_file(directory.learner_config, config.model_dump_json(indent=2, exclude={"bus"}).encode())

    settings, demonstrations = await asyncio.to_thread(learner_settings, config, directory)
    await asyncio.to_thread(say_streams, config, settings.model_directory)
    if await unless(stop, are_announced(bus, where)) is False:
        return False
    async with traced(config.metrics, run=config.run, role="learner"):
        progress = await run(bus, settings, demonstrations, stop, begin=record)
    if progress is not None:
        written = {"export": str(directory.export)} if progress.stage == "done" else {}
        log.info("learner_ends", stage=progress.stage, step=progress.step, **written)
    return True


def say_streams(config: RunConfig, model: Path) -> None:
    """Log, on rank 0 alone, how much traffic the streams of trajectories hold."""

    from launch.plan.plan import held_traffic, run_hf_config
    from learner.distributed.process_group import world_rank
    from learner.metrics.gpus import own_gpu
    from learner.model_directories.model_directory import load_hf_config

    if world_rank() or not config.learner.steps:
        return
    gpu = own_gpu()
    hf_config = load_hf_config(model) if model.is_dir() else run_hf_config(config)
    held = held_traffic(config, hf_config, gpu)
    figures = {"mib": held.stream_mib, "steps": round(held.steps, 1)}
    figures |= {} if held.seconds is None else {"seconds": round(held.seconds)}
    if held.remedy:
        log.warning("trajectory_streams_hold_little", **figures, remedy=held.remedy)
    else:
        log.info("trajectory_streams_hold", **figures)


def learner_settings(config: RunConfig, directory: RunDirectory) -> tuple["LearnerSettings", Path | None]:
    """Return the learner's settings, and where its demonstrations are; generated ones are written. A model of
    the hub is fetched as it was when the run began. Raises `ConfigError` when there is none."""
    from learner.config.process_settings import EngineContext, LearnerSettings
    from learner.initial.micro_batch import fitted

    demonstrations = config.warmup.demonstrations
    if config.warmup.steps and demonstrations is None and config.data.task:
        with one_at_a_time(directory.data):
            demonstrations = generate_task(config.data.task, directory.data, seed=config.seed).demonstrations
    settings = LearnerSettings(
        model=config.model,
        warmup=config.warmup,
        learner=config.learner,
        evaluation=config.evaluation,
        samples_per_prompt=config.admission.samples_per_prompt,
        seed=config.seed,
        model_directory=first_model(config, directory),
        checkpoints=directory.checkpoints,
        progress=directory.path / "progress.json",
        lineage=directory.path / "lineage.jsonl",
        export=directory.export,
        evaluated_on=config.actors.evaluates_on,
        colocation=config.colocation,
        engine_context=EngineContext(config.actors.engine.context, config.actors.engine.left_free),
    )
    return fitted(settings), demonstrations


async def serve_shadow(
    where: RunConfig, overrides: dict[str, Any], name: str, from_checkpoint: Path | None, stop: asyncio.Event
) -> None:
    _refuse_no_checkpoint(from_checkpoint)
    kept = RunDirectory(where.directory, where.run).shadow(name)
    async with connected(where, "shadow", stop, name=f"shadow-{name}") as bus:
        config = await joined(bus, where, overrides, stop)
        if config is None:
            return
        with no_collections():
            from learner.history.shadow import ShadowSettings, run_shadow

        directory = RunDirectory(config.directory, config.run)
        settings, demonstrations = await asyncio.to_thread(learner_settings, config, directory)
        own = replace(
            settings,
            checkpoints=kept / "checkpoints",
            progress=kept / "progress.json",
            lineage=kept / "lineage.jsonl",
            export=kept / "export",
        )
        shadow = ShadowSettings(name, own, kept / "metrics.jsonl", from_checkpoint)
        log.info("shadow_starting", run=config.run, shadow=name)
        progress = await run_shadow(bus, shadow, demonstrations, stop)
        log.info("shadow_ends", step=progress.step, steps_retired=progress.steps_retired)


def _refuse_no_checkpoint(directory: Path | None) -> None:
    if directory is not None and not (directory / "manifest.json").is_file():
        raise ConfigError(f"--from-checkpoint {directory} is not a checkpoint: it has no manifest.json")
