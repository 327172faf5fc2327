"""The storage process of a run, and processes of replay shards on other hosts."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import structlog

from bus.policy_names import DEFAULT_POLICY
from launch.model_files.model_directory import model_here, refuse_full_context
from launch.model_files.vision_checks import counts_images
from launch.process.run_connection import connected, joined
from launch.process.run_ending import noted_ending
from launch.process.settings_revision import refuse_unapplied, revision_of
from launch.run_view.alert_calls import AlertCalls
from launch.run_view.run_files import RunFiles, changed_settings, told_changes
from launch.run_view.run_lock import only_process
from launch.settings.config_checks import refuse_nobody_rolls_out
from launch.settings.run_config import RunConfig, policy_config
from storage.disk.run_directory import RunDirectory

log = structlog.get_logger()
LOCK_S = 5.0
"""Seconds in which what an earlier storage has started may end."""


async def serve_storage(config: RunConfig, stop: asyncio.Event, *, summary: bool = True) -> None:
    """Run the run's dispatcher and replay shards until `stop`, and those of each further policy's run.
    `summary` makes curves and a summary too."""
    async with asyncio.TaskGroup() as tasks:
        for name in config.policies:
            tasks.create_task(_serve_run(policy_config(config, name), stop, summary=summary))
        tasks.create_task(_serve_run(config, stop, summary=summary))


async def _serve_run(config: RunConfig, stop: asyncio.Event, *, summary: bool) -> None:
    refuse_full_context(config)
    refuse_nobody_rolls_out(config)
    directory = RunDirectory(config.directory, config.run)
    directory.refuse_unwritable()
    async with only_process(directory.path / "storage.lock", patience_s=LOCK_S):
        await _serve_alone(config, directory, stop, summary=summary)


async def _serve_alone(
    config: RunConfig, directory: RunDirectory, stop: asyncio.Event, *, summary: bool
) -> None:
    changed = changed_settings(RunFiles(directory.path, lenient=True).settings, config)
    directory.write_provenance(changed if summary else None)  # `launch local` has recorded them otherwise
    if changed:
        log.info("settings_changed", since_last_start=told_changes(changed))
    calls = AlertCalls(config)
    if summary:
        async with calls.failure_told(directory):
            with noted_ending(directory, stop):
                await _serve_from(config, directory, stop, summary=True)
        return
    try:
        await _serve_from(config, directory, stop, summary=False)
    finally:
        await calls.tell_if_orphaned(directory)


async def _serve_from(
    config: RunConfig, directory: RunDirectory, stop: asyncio.Event, *, summary: bool
) -> None:
    from launch.screens.conclusion import concluding
    from storage.metrics.sinks import metric_sinks
    from storage.service import StorageSettings, run_storage

    settings = StorageSettings(
        data=config.data,
        admission=config.admission,
        replay=config.replay,
        seed=config.seed,
        max_new_tokens=config.sampling.max_new_tokens,
        run=directory,
        config_json=config.model_dump_json(),
        model=model_here(config.model.path, directory),
        evaluation_sets=config.evaluation.sets,
        kept_evaluations=config.evaluation.kept_evaluations,
        shares_prefixes=config.learner.batch.share_prefixes,
        counts_images=counts_images(config),
        measures=config.trains == DEFAULT_POLICY,
        rolls_out=config.learner.steps > 0,
    )
    async with (
        metric_sinks(config.metrics, directory, settings.config_json) as sinks,
        connected(config, "storage", stop) as bus,
    ):
        await refuse_unapplied(bus, config)
        async with concluding(bus, config, directory) if summary else nullcontext():
            bus.state.revision = revision_of(settings.config_json)
            await run_storage(bus, replace(settings, sinks=tuple(sinks)), stop)


async def serve_shards(
    where: RunConfig, overrides: dict[str, Any], numbers: tuple[int, ...], stop: asyncio.Event
) -> None:
    from storage.shard.service import ShardsSettings, run_shards

    async with connected(where, "shards", stop) as bus:
        config = await joined(bus, where, overrides, stop)
        if config is not None:
            directory = RunDirectory(config.directory, config.run)
            await run_shards(bus, ShardsSettings(numbers, config.replay, directory), stop)
