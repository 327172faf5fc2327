"""The ways by which weights get into one SGLang server."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from actors.engines.announced_version import Published
from actors.engines.sglang.broadcast_group import LearnerGroup, Offer
from actors.engines.sglang.changes import takes_changes
from actors.engines.sglang.client.client import SglangClient, TooSlowError, UnreachableError
from actors.engines.sglang.client.preparation import prepared
from actors.engines.sglang.client.server_facts import ServerFacts, drafts, own_draft
from actors.engines.sglang.client.tensor_files import State
from actors.engines.sglang.client.weight_labels import weights_label
from actors.engines.sglang.server.gpu_count import replicas
from actors.engines.sglang.weights import HeldWeights, buckets
from actors.settings.engines import SglangEngineConfig, refuse_quantised
from bus.errors import BusError, ConfigError, EngineError, StorageError, WeightsKeptError
from bus.waiting import bounded, left_s

Load = Callable[[bool, float], Awaitable[int]]
"""Has the server take weights, and drop what it cached if told so; returns their version. The second argument
says until when, by the monotonic clock."""


class Loading:
    """Makes weights ready while the server generates; what it returns then makes the server take them."""

    def __init__(self, held: HeldWeights, client: SglangClient, facts: ServerFacts) -> None:
        self.held = held
        self._client = client
        self._facts = facts
        self._group = LearnerGroup(client, facts)
        self._published: Published | None = None
        """What is in the server, where it came by announcement."""
        self._in_server: int | None = None
        """Version of all that is held, when the server was given it; None when that is not certain."""
        self._takes_changes = not held.quantised and all(
            takes_changes(server, held.model_type, update_sessions=facts.update_sessions)
            for server in facts.settings
        )

    def check(self, config: SglangEngineConfig) -> None:
        """Raise `ConfigError` for a server that weights cannot get into as configured."""
        if self.held.quantised:
            refuse_quantised(config, self.held.source)
        self._facts.refuse_model(self.held.config, self._client.url)
        if self._facts.speculation == "NGRAM" and not self._facts.update_sessions:
            raise ConfigError(
                f"SGLang {self._facts.version} ends with its first update where speculative_algorithm=NGRAM: "
                "use 0.5.21 or later, or leave that out"
            )
        if self._facts.has_own_draft and any(replicas(server) > 1 for server in self._facts.settings):
            raise ConfigError(
                "this server has replicas (dp_size) and a draft model of its own: replicas take weights from "
                "files only, which SGLang has the draft model read too: set actors.fleet.engines instead of "
                "dp_size, or leave the draft model out"
            )
        if len({own_draft(server) for server in self._facts.settings if drafts(server)}) > 1:
            raise ConfigError(
                "one server of this pair has a draft model of its own, the other a part of the policy: give "
                "both the same speculative_draft_model_path"
            )
        if config.update == "group":
            self._group.refuse_unreachable()
        if config.nodes > 1 and config.in_files and not self._takes_changes:
            raise ConfigError(
                f"actors.engine.nodes={config.nodes} with update=disk: SGLang {self._facts.version} does "
                f"not take what changed of {self.held.model_type}, and says nothing of a node that cannot "
                "read whole files: set actors.engine.update=tensor"
            )

    async def tensors(self, config: SglangEngineConfig, state: State, policy_version: int) -> Load:
        """Return tensors from this host; without any the smallest again, for versions come with tensors
        only."""
        self._published = None
        state = state or self.held.smallest()
        return await self._kept(config, state, policy_version)

    async def published(self, config: SglangEngineConfig, published: Published) -> Load:
        """Return what the learner sends itself, or what it published. Raises `WeightsKeptError` for neither.
        All but the files is there, or given up, within `update_timeout_s`: the server goes on meanwhile."""
        end_s = time.monotonic() + config.update_timeout_s
        offer = await self._group.prepare(published, config.update_timeout_s)
        if offer:
            return partial(self._receive, config, offer, published)
        try:
            async with bounded(left_s(end_s), "the transport did not bring them"):
                state = await published.tensors()
        except (BusError, StorageError, EngineError) as error:
            raise WeightsKeptError(f"version {published.policy_version}: {error}") from error
        load = await self._kept(config, state, published.policy_version)
        self._published = published
        return load

    def has(self, published: Published, policy_version: int) -> bool:
        """Return whether version `policy_version`, which is in the server, is `published` or a later one."""
        held = self._published
        same_learner = held is not None and held.incarnation == published.incarnation
        return same_learner and policy_version >= published.policy_version

    def hold(self, state: State, policy_version: int) -> None:
        """Tensors from this host that the server is to take later, with all others: see `again`."""
        self.held.keep(state, policy_version)

    async def again(self, config: SglangEngineConfig, end_s: float) -> None:
        """Have the server take all weights that this host holds, if it holds any, until `end_s`."""
        if self.held.policy_version >= 0:
            self._in_server = None
            load = await self._kept(config, self.held.tensors, self.held.policy_version)
            await load(False, end_s)
            await self.taken()

    async def taken(self) -> None:
        """The server has read what it was given: the files go, and their pages back to the system. They
        alone, though a caller that is cancelled may have the next written meanwhile."""
        await asyncio.to_thread(self.held.drop, self.held.files)

    async def close(self) -> None:
        if self._published is not None:
            await self._group.end(self._published)

    async def _kept(self, config: SglangEngineConfig, state: State, policy_version: int) -> Load:
        """Take tensors that the server is to have; where it may have others than those held, it gets all."""
        certain = await self.has_what_is_held()
        changed = None
        if not certain:
            state = {**self.held.tensors, **state}
        if config.in_files:  # all outside the pause
            if certain and self._takes_changes:
                changed = await asyncio.to_thread(self.held.write_changes, state)
                if changed is not None:
                    await prepared(changed)
            if changed is None and config.nodes > 1:
                changed = await asyncio.to_thread(self.held.write_whole, state)
            elif changed is None and self._reads_files(config):
                await asyncio.to_thread(self.held.write, state)
        self.held.keep(state, policy_version)

        async def load(flush: bool, end_s: float) -> int:
            self._in_server = None
            await self._load(config, state, changed, policy_version, flush=flush, end_s=end_s)
            self._in_server = policy_version
            return policy_version

        return load

    async def _load(
        self, config: SglangEngineConfig, state: State, changed: Path | None, policy_version: int, *,
        flush: bool, end_s: float,
    ) -> None:  # fmt: skip
        client, facts, timeout_s = self._client, self._facts, left_s(end_s)
        if changed is not None:
            try:
                await client.load_changes(changed, policy_version, facts, flush=flush, timeout_s=timeout_s)
            except EngineError as error:  # a fault there ends the server: only its log says more
                remedy = "actors.engine.update=tensor gives it whole tensors"
                raise EngineError(f"{error}. It was to write in what changed: {remedy}") from error
        elif self._reads_files(config):
            directory = self.held.directory
            await client.load_files(directory, policy_version, flush=flush, timeout_s=timeout_s)
        else:
            parts = buckets(state)
            await client.load_tensors(parts, policy_version, facts, flush=flush, timeout_s=timeout_s)

    def _reads_files(self, config: SglangEngineConfig) -> bool:
        """Return whether the server gets whole tensors in files: of these a draft model takes what has its
        names, too."""
        return config.in_files and not self._facts.has_own_draft

    async def has_what_is_held(self) -> bool:
        """Return whether the server says that it has the version it was given: it may have been started
        again."""
        if self._in_server != self.held.policy_version:
            return False
        try:
            return await self._client.weight_version() == weights_label(self.held.policy_version)
        except EngineError:  # the load will say why
            return False

    async def _receive(
        self, config: SglangEngineConfig, offer: Offer, published: Published, flush: bool, end_s: float
    ) -> int:
        """Have the server take what the learner sends. Where that fails it gets all weights from here."""
        self._published, self._in_server = published, None
        try:
            await self._group.receive(offer, published, flush=flush, end_s=end_s)
        except (UnreachableError, TooSlowError):  # the server is dead, or waits for the learner still
            raise
        except (EngineError, BusError) as error:
            await self._group.leave(published, str(error))
        else:
            self.held.forget()  # held weights are older, if there are any
            return offer[0].policy_version
        try:
            async with bounded(left_s(end_s), "the transport did not bring them"):
                state = await published.tensors()
            load = await self._kept(config, state, published.policy_version)
        except (BusError, StorageError, ConfigError) as error:
            raise EngineError(f"not all of version {offer[0].policy_version} came: {error}") from error
        return await load(flush, end_s)
