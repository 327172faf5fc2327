"""Engines that only evaluate: servers beside the rollouts', or those of an actor that rolls out nothing."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog

from actors.engines.base import Engine
from actors.engines.fleet.build import engine_builds, evaluation_engine, refuse_other_angles
from actors.engines.fleet.engine_admin import attached_builds
from actors.engines.fleet.fleet import Fleet
from actors.engines.fleet.gpu_plan import gpu_plan
from actors.engines.sglang.client.client import facts_at
from actors.engines.sglang.client.server_facts import ServerFacts
from actors.engines.sglang.client.tensor_files import State
from actors.engines.sglang.engine import SglangEngine
from actors.settings.actors import ActorsConfig
from actors.settings.engines import EngineConfig, SglangEngineConfig
from actors.weights.follow import fetch_state
from bus.errors import BusError, ConfigError, EngineError, StorageError
from bus.messages import PolicyManifest
from storage.weights.blob_sources import BlobSource

log = structlog.get_logger()
LEFT_TOKENS = 16
"""Tokens of the shortest prompt that is worth an answer."""


def exact_engine(engine: EngineConfig) -> EngineConfig:
    """Return the settings with which an engine takes the weights of whichever version it is given. It is not
    in the learner's group, in which the newest version alone is sent, and takes whole weights."""
    if engine.in_process:
        return engine
    merging = engine.servers.model_copy(update={"adapter": "merged"})
    if merging.update != "group":
        return merging
    return merging.model_copy(update={"update": "tensor" if engine.attached else "disk"})


def own_servers(actors: ActorsConfig) -> SglangEngineConfig:
    """Return the settings of the servers that `evaluation.servers` or `evaluation.urls` ask for. Running
    servers get tensors in requests, unless those of the rollouts read them from files."""
    rolling = actors.engine.servers
    own = rolling.model_copy(
        update={"routed_experts": False, "url": None, "urls": (), "update": "disk", "adapter": "merged"}
    )
    if not actors.evaluation.urls:
        return own
    update = "disk" if rolling.attached and rolling.update == "disk" else "tensor"
    # without settings of a server, since nobody asks these what sampling kept
    return own.attached_to("").model_copy(
        update={"url": None, "urls": actors.evaluation.urls, "update": update, "server": {}}
    )


def beside_rollouts(actors: ActorsConfig, model: Path, logs: Path, *, actor: str) -> Callable[[], Engine]:
    """Return what builds the engine for held-out prompts of an actor that rolls out, not started. Raises
    `ConfigError` for a model that servers would compute otherwise than the learner."""
    if not actors.evaluation.has_own_servers:
        return partial(evaluation_engine, actors.engine, model)
    settings = own_servers(actors)
    refuse_other_angles(settings, model)
    gpus = {f"evaluation-{number}": gpu for number, gpu in enumerate(gpu_plan(actors).evaluation)}
    builds = attached_builds(settings, model) or engine_builds(settings, model, gpus, logs, actor=actor)
    return partial(Fleet, builds, actors.fleet)


async def refuse_unfit_servers(
    actors: ActorsConfig, model: Path, blobs: BlobSource, policy: PolicyManifest, *, max_new_tokens: int
) -> None:
    """Raise `ConfigError` for a running server that cannot evaluate the run's model, such as `policy`."""
    if not actors.evaluation.urls:
        return

    settings = own_servers(actors)
    await check_servers(settings, model, max_new_tokens=max_new_tokens)
    try:
        state = await fetch_state(blobs, policy)
    except (BusError, StorageError) as error:  # a newer version has taken its place: evaluations will tell
        log.warning("evaluation_servers_not_tried", policy_version=policy.policy_version, reason=str(error))
    else:
        await check_weights(settings, model, state, policy.policy_version)


async def check_servers(settings: SglangEngineConfig, model: Path, *, max_new_tokens: int) -> None:
    """Look at each running server that is to evaluate the model in a directory. Raises `ConfigError` for one
    that does not answer, is no SGLang server, serves another kind of model, or has no room for an answer."""
    architectures = json.loads((model / "config.json").read_text()).get("architectures") or []
    for url in settings.attached:
        facts = await _facts(url)
        if facts.architectures and set(facts.architectures).isdisjoint(architectures):
            raise ConfigError(
                f"{url} serves {', '.join(facts.architectures)} ({facts.model}), and the run's model is "
                f"{', '.join(architectures)}: it cannot take its weights: start it with the run's model"
            )
        room = facts.longest_prompt
        if room is not None and room < max_new_tokens + LEFT_TOKENS:
            raise ConfigError(
                f"{url} takes contexts of {room} tokens, and an answer may have sampling.max_new_tokens="
                f"{max_new_tokens}: start it with a larger --context-length and --max-total-tokens, or "
                "lower max_new_tokens"
            )


async def check_weights(settings: SglangEngineConfig, model: Path, state: State, policy_version: int) -> None:
    """Give each running server the weights of a version. Raises `ConfigError` for one that refuses."""
    for url in settings.attached:
        engine = SglangEngine(model, settings.attached_to(url), Path())
        try:
            await engine.start()
            await engine.load_weights(state, policy_version)
        except EngineError as error:
            raise ConfigError(
                f"{url} does not take the weights of version {policy_version}: {error}. Its --model-path "
                "must be the run's model"
            ) from error
        finally:
            await engine.close()


async def _facts(url: str) -> ServerFacts:
    try:
        return await facts_at(url)
    except EngineError as error:
        raise ConfigError(
            f"{url} cannot evaluate: {error}. Start SGLang there first, or leave it out of the settings; "
            "other servers take no weights, and may only answer for a model that stays as it is, as one of "
            "actors.evaluation.endpoints"
        ) from error
