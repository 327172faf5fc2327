"""Engines that somebody else keeps alive: those that an actor begins with, and those that come and go."""

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import structlog

from actors.engines.base import Engine
from actors.engines.fleet.engine_claims import EngineClaims
from actors.engines.fleet.fleet import Fleet
from actors.engines.fleet.member import Build
from actors.engines.fleet.shared_servers import SharedServers
from actors.engines.on_policy import tells_unscaled_logprobs
from actors.engines.served_adapters import ServedAdapters
from actors.settings.engines import EngineConfig, SglangEngineConfig
from bus.codec import Message
from bus.connection import Bus
from bus.errors import EngineError
from bus.requests import Done, EngineChange

log = structlog.get_logger()


def attached_builds(
    config: EngineConfig, model: Path, served: ServedAdapters | None = None
) -> Mapping[str, Build]:
    """Return what builds an engine for each server that the settings attach to, by its URL; empty for
    none."""
    servers = config.servers
    return {url.rstrip("/"): _build(servers.attached_to(url), model, served) for url in config.attached}


def subject_of(bus: Bus, actor: str) -> str:
    """Return where an actor hears of engines; a host's name may have dots."""
    return bus.subject("rpc", "engines", actor.replace(".", "_"))


class EngineAdmin:
    """Answers `launch engines`: servers join the actor's fleet while it works, and leave it."""

    def __init__(  # noqa: PLR0913 - an actor's fleet, and all that decides who may join it
        self, bus: Bus, fleet: Fleet, config: EngineConfig, model: Path, claims: EngineClaims, *,
        actor: str, colocated: bool, shared: SharedServers | None = None, exact: bool = False,
    ) -> None:  # fmt: skip
        """Answer for the fleet of one policy."""
        self.refusal = ""
        """Why no engine may join or leave; empty where it may."""
        self._bus = bus
        self._fleet = fleet
        self._config = config.servers
        self._model = model
        self._claims = claims
        self._actor = actor
        self._colocated = colocated
        self._shared = shared or SharedServers(None, {})
        self._like_learner = exact or tells_unscaled_logprobs(config)
        self._one_at_a_time = asyncio.Lock()

    async def run(self, stop: asyncio.Event) -> None:
        serving = await self._bus.serve(subject_of(self._bus, self._actor), EngineChange, self._change)
        await stop.wait()
        await serving.unsubscribe()

    async def _change(self, change: EngineChange) -> list[Message]:
        """Answer when it is done: a server that joined serves as soon as it has the newest weights. Raises
        EngineError for a URL where no SGLang server is, and for an engine that cannot leave."""
        if self.refusal:
            raise EngineError(self.refusal)
        async with self._one_at_a_time:
            if change.action == "join":
                await self._join(change.engine.rstrip("/"))
            else:
                await self._leave(change.engine.rstrip("/"))
        log.info("engine_joined" if change.action == "join" else "engine_left", engine=change.engine)
        return [Done()]

    async def _join(self, url: str) -> None:
        from actors.engines.fleet.build import refuse_unfit_model

        if self._colocated:
            raise EngineError(
                f"{url} cannot join: this actor shares its devices with the learner (colocation.enabled), "
                "and only an engine that it starts itself frees them: have it join an actor that was started "
                "with --colocation.no-enabled"
            )
        if self._like_learner:
            raise EngineError(
                f"{url} cannot join: engines of this run compute as the learner does (model.numerics), and a "
                "running server has settings of its own: start another actor, with engines of its own"
            )
        if url in self._fleet.engines:
            raise EngineError(f"{url} is one of this actor's engines already")
        config = self._config.attached_to(url)
        await asyncio.to_thread(refuse_unfit_model, config, self._model)
        await _look_at(url, config, self._model, self._shared.own)
        await self._claims.claim(url)
        builds = {url: _build(config, self._model, self._shared.own)}
        try:
            self._fleet.join(url, self._shared.hosts(builds)[url])
            self._shared.joined(url)
        except BaseException:
            await self._claims.release(url)
            raise

    async def _leave(self, name: str) -> None:
        names = set(self._fleet.engines)
        if name not in names:
            raise EngineError(f"no engine {name!r} here: there are {', '.join(sorted(names))}")
        if names == {name}:
            raise EngineError(f"{name} is the only engine here: have another join first, or stop the actor")
        await self._shared.leave(name)
        await self._fleet.leave(name)
        await self._claims.release(name)


def _build(config: SglangEngineConfig, model: Path, served: ServedAdapters | None) -> Build:
    from actors.engines.fleet.build import build_engine

    no_log = Path()  # the server is not ours, and writes its own
    build: partial[Engine] = partial(build_engine, config, model, no_log, served=served)
    return partial(asyncio.to_thread, build)


async def _look_at(url: str, config: SglangEngineConfig, model: Path, served: ServedAdapters | None) -> None:
    """Raise EngineError unless an SGLang server answers there, and ConfigError where it would go on with
    older weights of the model, cannot have these adapters or does not say what engines with these settings
    are asked."""
    from actors.engines.sglang.adapters import refuse_unfit
    from actors.engines.sglang.client.client import facts_at

    facts = await facts_at(url)
    facts.refuse_model(json.loads((model / "config.json").read_text()), url)
    facts.refuse_silence(config, url, of_experts=config.routed_experts)
    if served is not None:
        refuse_unfit(url, facts, served)
