"""What is checked before a run starts: in earnest, and by a dry run that starts nothing."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from actors.environments.build import check_environment
from actors.environments.prompt_choices import refuse_unknown_choices
from actors.environments.sample_calls import sample_calls, sample_scores
from actors.rewards.group_filters import load_filter
from actors.rewards.scoring.sample_call import check_calls
from actors.settings.engines import refuse_stray_node
from bus.codec import Json
from bus.config import without_credentials
from bus.connection import Bus
from bus.errors import ConfigError
from bus.messages import Prompt
from bus.policy_names import DEFAULT_POLICY
from bus.process.work_progress import long_work
from bus.server.nats_server import nats_binary
from launch.checks.engine_check import refuse_no_sglang
from launch.checks.model_check import refuse_models
from launch.checks.model_remarks import model_remarks
from launch.checks.resumption import finished
from launch.model_files.hub_revision import pinned
from launch.model_files.model_directory import (
    model_directory,
    model_here,
    refuse_full_context,
    refuse_headless_model,
    refuse_not_finite_model,
    refuse_other_angles,
)
from launch.model_files.vision_checks import refuse_unfit_vision
from launch.process.record_trust import unsigned_remark
from launch.run_view.alert_calls import AlertCalls
from launch.run_view.recorded_runs import going_on
from launch.run_view.source_run import refuse_other_origin, told_beginning
from launch.settings.config_checks import refuse_nobody_rolls_out
from launch.settings.run_config import RunConfig, of_policy
from storage.built_in_tasks.generators import load_demonstrations
from storage.disk.file_users import hidden_owner, processes_holding
from storage.disk.run_directory import RunDirectory
from storage.metrics.sinks import refuse_missing
from storage.prompt_files.dataset import refuse_large
from storage.prompt_files.pairs import load_pairs
from storage.prompt_files.rows import read_rows
from storage.prompts.length_check import check_measured_prompts, check_prompt_lengths
from storage.prompts.run_prompts import Prompts, read_prompts


def scratch_tokens(prompt: Prompt) -> int:
    """Return the tokens of a prompt as the scratch model's chat template renders it: one for each character,
    one before each message, one behind each of the assistant's, and one that asks for an answer. Images are
    not counted."""
    content = prompt.content
    chat: list[Json] = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return 1 + sum(_tokens(message) for message in chat)


def _tokens(message: Json) -> int:
    if not isinstance(message, dict):
        return 0
    content = message.get("content")
    length = len(content) if isinstance(content, str) else 0
    return 1 + length + (message.get("role") == "assistant")


def refuse_long_for_scratch(prompts: Iterable[Prompt], config: RunConfig) -> None:
    """Raise `ConfigError` for the first prompt that leaves no room for an answer in the scratch model."""
    if config.data.long_prompts != "refuse":
        return
    context, limit = config.model.scratch.context, config.sampling.max_new_tokens
    for number, prompt in enumerate(prompts, start=1):
        if (tokens := scratch_tokens(prompt)) + limit > context:
            raise ConfigError(
                f"prompt {number} has {tokens} tokens of the scratch model, one a character: with {limit} "
                f"new ones it exceeds model.scratch.context={context}: raise that, lower "
                "sampling.max_new_tokens, "
                'name a model by --model.path, or leave such prompts out with data.long_prompts = "skip"'
            )


class Checked(NamedTuple):
    """What a start knows when it has checked everything."""

    prompts: Prompts
    of_models: list[str] | None
    """What `model_remarks` says of the models of the run's policies; None where these were left out."""


async def check_start(
    config: RunConfig, run: RunDirectory, *, own_bus: bool = False, models: bool = True
) -> Checked:
    """Check what can be wrong before anything starts; prompts of a generated task are written into `run`.
    `models=False` leaves out what the learner would refuse of models. Raises `ConfigError` for the first
    thing that is wrong."""
    with long_work(f"checking what run {config.run!r} needs"):
        return await _checked(config, run, own_bus=own_bus, models=models)


async def _checked(config: RunConfig, run: RunDirectory, *, own_bus: bool, models: bool) -> Checked:
    if own_bus:
        nats_binary()  # raises where there is none to start
    refuse_nobody_rolls_out(config)
    await check_environment(config.actors)
    load_filter(config.actors.group_filter, config.actors.group_limits)
    each = _of_each_policy(config)
    for one in each:
        await asyncio.to_thread(_check_model, one)
    of_models = await refuse_models(each) if models else None
    refuse_stray_node(config.actors.engine.servers)
    await asyncio.to_thread(refuse_no_sglang, config)
    refuse_missing(config.metrics)
    prompts = _prompts(config, run)
    if config.learner.steps:
        refuse_unknown_choices(prompts.training, config.actors, where=prompts.source)
    refuse_unknown_choices(prompts.heldout, config.actors, where="held-out prompts")
    for name, found in prompts.sets.items():
        refuse_unknown_choices(found, config.actors, where=f"evaluation.sets {name!r}")
    await _call_rewards(config, prompts)
    return Checked(prompts, of_models)


def _prompts(config: RunConfig, run: RunDirectory) -> Prompts:
    trained_on = config.learner.steps > 0
    return read_prompts(config.data, run, config.seed, config.evaluation.sets, trained_on=trained_on)


async def _call_rewards(config: RunConfig, prompts: Prompts) -> None:
    """Call each reward once for each source of prompts. Raises `ConfigError` for one that does not work."""
    parts, calls = [source.count for source in prompts.sources], []
    if config.learner.steps:
        calls = sample_calls(prompts.training, config.actors, where=prompts.source, parts=parts)
    for name, measured in prompts.measured.items():
        calls += sample_calls(measured, config.actors, where=name)
    await check_calls(calls)


def _of_each_policy(config: RunConfig) -> list[RunConfig]:
    return [config, *(of_policy(config, name) for name in config.policies)]


def _check_model(config: RunConfig) -> None:
    """Refuse a model directory, its context, head or angles, and demonstrations that cannot be what they are
    to be."""
    where = "" if config.trains == DEFAULT_POLICY else f"policies.{config.trains}."
    if config.model.path is not None:
        run = RunDirectory(config.directory, config.run)
        model_directory(pinned(config.model.path, run), setting=f"{where}model.path")
    refuse_full_context(config)
    refuse_headless_model(config)
    refuse_other_angles(config)
    refuse_unfit_vision(config)
    if config.warmup.steps and config.warmup.demonstrations is not None:
        load = load_pairs if config.warmup.loss.facts.of_pairs else load_demonstrations
        load(config.warmup.demonstrations)


async def rehearse_local(
    config: RunConfig, stop: asyncio.Event, *, own_bus: bool, models: bool = True
) -> str:
    """Check what `launch local` and the processes that it starts check first, as far as this host shows it.

    Starts nothing that stays and leaves no file; a bus that is not the run's own must answer. Returns what
    was found, in words. Raises `ConfigError` for the first thing that is wrong, `BusError` for a bus that is
    away."""
    from learner.algorithms.plugin import refuse_bad_plugins

    run = RunDirectory(config.directory, config.run)
    if (complete := finished(config, run)) is not None:
        return complete
    run.refuse_unwritable()
    refuse_other_origin(config, run)
    AlertCalls(config)  # refuses a program that is not here
    remark = _refuse_live(config)
    for one in _of_each_policy(config):
        refuse_bad_plugins(one.learner)
    with TemporaryDirectory(prefix="sluice-dry-run-") as scratch:
        prompts, of_models = await check_start(
            config, RunDirectory(Path(scratch), config.run), own_bus=own_bus, models=models
        )
        for one in _of_each_policy(config) if models else []:  # a start leaves that to who loads the model
            await asyncio.to_thread(refuse_not_finite_model, one)
        if config.model.path is None and config.learner.steps:
            refuse_long_for_scratch(prompts.training, config)
        found = await _rehearse_storage(config, prompts, None if own_bus else stop) + remark
        scores = sample_scores(prompts.training, config.actors) if config.learner.steps else []
        return "\n".join([found, *scores, *start_remarks(config, of_models)])


def start_remarks(config: RunConfig, of_models: Iterable[str] | None = None) -> list[str]:
    """Say where records are not signed, with whose weights the run begins, what `check_start` found of the
    models, and what of each policy's objective is set otherwise than in the papers that its parts are from.
    Where `check_start` left models out, this process looks at them, and loads torch."""
    policies = _of_each_policy(config)
    of_models = model_remarks(policies) if of_models is None else of_models
    different = [_of_policy(one, said) for one in policies for said in one.learner.differences_from_papers]
    return [*filter(None, [unsigned_remark(config.bus), told_beginning(config), *of_models]), *different]


def _of_policy(config: RunConfig, sentence: str) -> str:
    return sentence if config.trains == DEFAULT_POLICY else f"Policy {config.trains!r}: {sentence}"


async def rehearse_storage(config: RunConfig, stop: asyncio.Event) -> str:
    RunDirectory(config.directory, config.run).refuse_unwritable()
    AlertCalls(config)
    refuse_missing(config.metrics)
    for one in _of_each_policy(config):
        refuse_full_context(one)
    with TemporaryDirectory(prefix="sluice-dry-run-") as scratch:
        run = RunDirectory(Path(scratch), config.run)
        prompts = _prompts(config, run)
        return await _rehearse_storage(config, prompts, stop)


async def _rehearse_storage(config: RunConfig, prompts: Prompts, stop: asyncio.Event | None) -> str:
    """Check the prompts against the model and, with `stop`, against the bus; return what was found."""
    run = RunDirectory(config.directory, config.run)
    run.refuse_other_format()
    model, limit = model_here(config.model.path, run), config.sampling.max_new_tokens
    if model is not None:
        await asyncio.to_thread(check_measured_prompts, prompts.measured, model)
        if config.learner.steps and config.data.long_prompts == "refuse":
            await asyncio.to_thread(check_prompt_lengths, prompts.training, model, max_new_tokens=limit)
    bus = "a bus of its own"
    if stop is not None:
        bus = f"the bus at {without_credentials(config.bus.url)} answers"
        async with Bus.connect(config.bus, config.run, name="dry-run", stop=stop) as connected:
            largest = connected.client.max_payload
            refuse_large(prompts.training, prompts.source, largest_message=largest)
    generated = config.data.prompts is None and not config.data.sources
    source = f"task {config.data.task}" if generated else prompts.source
    warmup, heldout = config.warmup, len(prompts.heldout)
    material = f"{len(prompts.training)} prompts of {source}"
    if not config.learner.steps and warmup.demonstrations is not None:
        material = f"{warmup.steps} supervised steps on {warmup.demonstrations}"
        heldout = sum(1 for _ in read_rows(warmup.heldout)) if warmup.heldout is not None else heldout
    return f"run {config.run!r} may start: {material}, {heldout} held-out, {bus}"


def _refuse_live(config: RunConfig) -> str:
    """Raise `ConfigError` for a run that goes on in its directory; return a remark if that cannot be seen."""
    lock = config.directory / config.run / "lock"
    if holders := processes_holding([lock])[lock]:
        raise going_on(lock.parent, holders[0])
    owner = hidden_owner(lock.parent)
    if owner is None:
        return ""
    return f"; {lock.parent} belongs to {owner}, whose processes cannot be seen: it may be going on already"
