"""A fleet of engines that share devices, in virtual time."""

import asyncio
from functools import wraps

import pytest

from actors.engines.base import Generation, GenerationRequest, Sampling
from actors.engines.fleet.fleet import Fleet
from actors.settings.fleet import FleetConfig
from bus.errors import EngineError
from tests.actors.paced_engine import PacedEngine, chain
from tests.actors.virtual_time import run_virtually


def virtual(test):
    """Run a test on a virtual clock."""

    @wraps(test)
    def run(*args, **kwargs):
        run_virtually(test(*args, **kwargs))

    return run


class Yard:
    """A fleet, and every engine that was ever built for it by the name of its place."""

    def __init__(self, count=2, *, version=1, **settings):
        engine_settings = {
            key: settings.pop(key) for key in ("token_s", "update_s", "keeps") if key in settings
        }
        self.engine_settings = engine_settings
        self.built: dict[str, list[PacedEngine]] = {}
        self.version = version
        self.contexts: dict[str, int] = {}
        self.broken = False
        self.fleet = Fleet({f"e{n}": self.build(f"e{n}") for n in range(count)}, FleetConfig(**settings))

    def build(self, name):
        async def built():
            if self.broken:
                raise EngineError("no memory left")
            context = {"context": self.contexts[name]} if name in self.contexts else {}
            engine = PacedEngine(**self.engine_settings, **context)
            self.built.setdefault(name, []).append(engine)
            return engine

        return built

    def engine(self, name) -> PacedEngine:
        """The present one."""
        return self.built[name][-1]

    async def __aenter__(self):
        await self.fleet.start()
        if self.version >= 0:
            await self.fleet.load_weights({"a": self.version, "b": 0}, self.version)
        return self

    async def __aexit__(self, *exc):
        await self.fleet.close()
        assert all(engine.closed for engines in self.built.values() for engine in engines)

    def ask(self, name, prompt=(5, 6), new=10, **sampling):
        request = GenerationRequest(name, list(prompt), Sampling(max_new_tokens=new, **sampling))
        return asyncio.create_task(self.fleet.generate(request))

    def engine_of(self, name):
        """Who works on a request."""
        [found] = [e for e in self.all() if any(asked.endswith(f"-{name}") for asked in e.working)]
        return found

    def all(self):
        return [engine for engines in self.built.values() for engine in engines]


def is_right(generation: Generation, prompt=(5, 6), new=10):
    assert generation.token_ids.tolist() == chain(list(prompt), new)
    assert generation.logprobs.tolist() == pytest.approx([-token / 100 for token in generation.token_ids])
    assert len(generation.policy_versions) == new
    assert generation.finish_reason == "length"
