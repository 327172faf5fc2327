"""Engines that only evaluate: servers beside the rollouts', or those of an actor that rolls out nothing."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog

from actors.engines.base import Engine
from actors.engines.fleet.build import engine_builds, evaluation_engine, refuse_other_angles
from actors.engines.fleet.engine_admin import attached_builds
from actors.engines.fleet.fleet import Fleet
from actors.engines.fleet.gpu_plan import gpu_plan
from actors.settings.actors import ActorsConfig
from actors.settings.engines import EngineConfig, SglangEngineConfig
from actors.weights.follow import fetch_state
from bus.errors import BusError, StorageError
from bus.messages import PolicyManifest
from storage.weights.blob_sources import BlobSource

log = structlog.get_logger()


def exact_engine(engine: EngineConfig) -> EngineConfig:
    """Return the settings with which an engine takes the weights of whichever version it is given.

    It is not in the learner's group, in which the newest version alone is sent, and takes whole weights."""
    if engine.in_process:
        return engine
    merging = engine.servers.model_copy(update={"adapter": "merged"})
    if merging.update != "group":
        return merging
    return merging.model_copy(update={"update": "tensor" if engine.attached else "disk"})


def own_servers(actors: ActorsConfig) -> SglangEngineConfig:
    """Return the settings of the servers that `evaluation.servers` or `evaluation.urls` ask for.

    Running servers get tensors in requests, unless those of the rollouts read them from files."""
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
    """Return what builds the engine for held-out prompts of an actor that rolls out, not started.

    Raises `ConfigError` for a model that servers would compute otherwise than the learner."""
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
    from actors.engines.sglang.server_checks import check_servers, check_weights

    settings = own_servers(actors)
    await check_servers(settings, model, max_new_tokens=max_new_tokens)
    try:
        state = await fetch_state(blobs, policy)
    except (BusError, StorageError) as error:  # a newer version has taken its place: evaluations will tell
        log.warning("evaluation_servers_not_tried", policy_version=policy.policy_version, reason=str(error))
    else:
        await check_weights(settings, model, state, policy.policy_version)
