"""A prefill and a decode server of SGLang spoken to as one server."""

import asyncio
import secrets
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import structlog
import torch

from actors.engines.base import NOTHING, Generation, GenerationRequest
from actors.engines.expert_routing import Routing
from actors.engines.sglang.client.answers import Streamed
from actors.engines.sglang.client.client import Json, SglangClient, TooSlowError, UnreachableError
from actors.engines.sglang.client.request_bodies import probe_body, request_body
from actors.engines.sglang.client.server_facts import ServerFacts
from actors.engines.sglang.requests_in_progress import ABORT_AGAIN_S
from bus.errors import EngineError, RequestRefusedError
from bus.waiting import bounded, retrieve_exception

log = structlog.get_logger()
One = TypeVar("One")
Other = TypeVar("Other")
NOWHERE: Json = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
"""SGLang's own mark of a request that is for one half of a pair alone; its answer means nothing."""
FIRST_TRANSFER_S = 60.0
"""The first makes the connection."""
HAND_OVER_S = 10.0
"""Prompts that are not through after this are ended, and begin again with the new weights."""
ENDING_S = 20.0


@dataclass(eq=False)
class _Asked:
    rid: str
    first: "asyncio.Task[Any]"
    rest: "asyncio.Task[Any]"
    ended: bool = False

    @property
    def crossing(self) -> bool:
        """Return whether the request may lack its first token, or the decode server may not have that."""
        return not self.first.done()


class PairClient(SglangClient):
    """Both servers of a pair: what is asked of it goes to both, and the answers are the decode server's.

    A request goes to both with the number of a room, by which they find each other. The prefill server
    computes the prompt and draws the first token, the other gets keys, values and token from it and draws the
    rest. Weights change when no request is on its way from one to the other: a first token's version is that
    of the prefill server's answer, all others' that of the decode server's."""

    def __init__(self, prefill: SglangClient, decode: SglangClient) -> None:
        super().__init__(decode.url, decode._session, decode._generating)
        self.prefill = prefill
        self.decode = decode
        self._prefill_facts: ServerFacts | None = None
        self._meeting: Json = {}
        self._asked: dict[str, _Asked] = {}
        self._paused = False
        self._updates = 0

    async def close(self) -> None:
        await self.prefill.close()
        await self.decode.close()

    async def facts(self, meeting: Json | None = None) -> ServerFacts:
        """Return what the pair can do. Raises `EngineError` unless they are a pair and a token gets
        across."""
        first, rest = await together(self.prefill.facts(NOWHERE), self.decode.facts(NOWHERE))
        for client, found, role in ((self.prefill, first, "prefill"), (self.decode, rest, "decode")):
            if found.role != role:
                raise EngineError(
                    f"{client.url} is no {role} server of a pair: its disaggregation_mode is {found.role!r}"
                )
        self._prefill_facts = first
        host = urlsplit(self.prefill.url).hostname
        self._meeting = {"bootstrap_host": host, "bootstrap_port": first.bootstrap_port}
        body = probe_body() | self._room()
        await together(
            self.prefill._call("POST", "/generate", body, timeout_s=FIRST_TRANSFER_S),
            self.decode._call("POST", "/generate", body, timeout_s=FIRST_TRANSFER_S),
        )
        return replace(
            rest,
            reports_spans=first.reports_spans and rest.reports_spans,
            settings=first.settings + rest.settings,
        )

    async def generate(
        self, request: GenerationRequest, *, rid: str, salt: str, timeout_s: float,
        routing: Routing | None = None, streamed: Streamed | None = None, adapter: str = "",
    ) -> Generation:  # fmt: skip
        """Continue a prompt, as `SglangClient.generate`. One that is not across when weights change is
        `NOTHING`: it can be asked for again. One whose tokens are of no certain version from some point on
        ends there."""
        if self._paused:
            return NOTHING
        body = request_body(request, rid=rid, salt=salt, adapter=adapter) | self._room()
        updates = self._updates
        asked = self._asked[rid] = _Asked(
            rid,
            asyncio.create_task(self.prefill.answer(body, request, timeout_s=timeout_s)),
            asyncio.create_task(self.decode.answer(body, request, timeout_s=timeout_s, streamed=streamed)),
        )
        try:
            generation, said = await _answer(asked, request)
        finally:
            del self._asked[rid]
            for half in (asked.first, asked.rest):
                half.add_done_callback(retrieve_exception)
                half.cancel()
        if updates != self._updates and len(generation.token_ids) and said.get("num_retractions", 1):
            # put aside for want of memory, perhaps while weights changed: nobody knows of which they are
            return streamed.kept() if streamed else NOTHING
        return generation

    async def abort(self, rid: str) -> None:
        """End a request at both, and any other whose rid begins so."""
        await asyncio.sleep(0)  # a request of this turn of the loop gets there first
        if asked := self._asked.get(rid):
            asked.ended = True
        await _at_both(self.prefill.abort(rid), self.decode.abort(rid))

    async def abort_all(self) -> None:
        await asyncio.sleep(0)  # as above
        for asked in self._asked.values():
            asked.ended = True
        await _at_both(self.prefill.abort_all(), self.decode.abort_all())

    async def healthy(self, timeout_s: float) -> bool:
        return all(await together(self.prefill.healthy(timeout_s), self.decode.healthy(timeout_s)))

    async def pause(self, mode: Literal["in_place", "retract"]) -> None:
        """Stop generating, once all prompts that are under way are with the decode server or ended."""
        self._paused = True
        await self._handed_over()
        await self.decode.pause(mode)

    async def resume(self) -> None:
        await together(self.prefill.resume(), self.decode.resume())
        self._paused = False

    async def load_files(
        self, directory: Path, policy_version: int, *, flush: bool, timeout_s: float
    ) -> None:
        self._updates += 1
        await together(
            self.prefill.load_files(directory, policy_version, flush=flush, timeout_s=timeout_s),
            self.decode.load_files(directory, policy_version, flush=flush, timeout_s=timeout_s),
        )

    async def load_tensors(
        self, buckets: Iterable[Mapping[str, torch.Tensor]], policy_version: int, facts: ServerFacts,
        *, flush: bool, timeout_s: float,
    ) -> None:  # fmt: skip
        assert self._prefill_facts is not None, "the engine asks for facts first"
        self._updates += 1
        parts = list(buckets)

        async def load(client: SglangClient, facts: ServerFacts) -> None:
            await client.load_tensors(parts, policy_version, facts, flush=flush, timeout_s=timeout_s)

        await together(load(self.prefill, self._prefill_facts), load(self.decode, facts))

    async def weight_version(self) -> str:
        """Return the version that both say their weights are; empty where they differ."""
        first, rest = await together(self.prefill.weight_version(), self.decode.weight_version())
        return rest if first == rest else ""

    async def load_changes(
        self, file: Path, policy_version: int, facts: ServerFacts, *, flush: bool, timeout_s: float
    ) -> None:
        assert self._prefill_facts is not None, "the engine asks for facts first"
        self._updates += 1
        given = file, policy_version
        await together(
            self.prefill.load_changes(*given, self._prefill_facts, flush=flush, timeout_s=timeout_s),
            self.decode.load_changes(*given, facts, flush=flush, timeout_s=timeout_s),
        )

    async def release(self, timeout_s: float) -> None:
        raise EngineError("the servers of a pair do not free their devices")

    async def checksums(self) -> dict[str, str]:
        """Return checksums of both servers' parameters; names of the prefill server begin with `prefill.`."""
        first, rest = await together(self.prefill.checksums(), self.decode.checksums())
        return rest | {f"prefill.{name}": checksum for name, checksum in first.items()}

    def _room(self) -> Json:
        return {**self._meeting, "bootstrap_room": secrets.randbits(62) + 1}

    async def _handed_over(self) -> None:
        """Return when no request is on its way from one server to the other. Those that have not got across
        in time, since the decode server has no room for them or their prompts are long, are ended at both."""
        if crossing := [asked.first for asked in self._asked.values() if asked.crossing]:
            await asyncio.wait(crossing, timeout=HAND_OVER_S)
        if unfinished := [asked for asked in self._asked.values() if asked.crossing]:
            log.info("prompts_begin_again", requests=len(unfinished))
            async with bounded(ENDING_S, f"{len(unfinished)} requests at {self.prefill.url} did not end"):
                await asyncio.gather(*map(self._end, unfinished))

    async def _end(self, asked: _Asked) -> None:
        while pending := [half for half in (asked.first, asked.rest) if not half.done()]:
            with suppress(EngineError):  # the request hears of it too
                await self.abort(asked.rid)
            await asyncio.wait(pending, timeout=ABORT_AGAIN_S)


async def _answer(asked: _Asked, request: GenerationRequest) -> tuple[Generation, Mapping[str, Any]]:
    """Return what both make of a request, and what the decode server says besides. One that is ended before
    its first token is across fails at one of them or at both, and is `NOTHING`."""
    halves = asked.first, asked.rest
    await asyncio.wait(halves, return_when=asyncio.FIRST_EXCEPTION)
    if asked.ended:
        await asyncio.wait(halves)  # each half hears of the end by itself
    try:
        for half in (asked.rest, asked.first):
            if half.done():
                half.result()
    except (RequestRefusedError, UnreachableError, TooSlowError):
        raise
    except EngineError:
        if not asked.ended:
            raise
        return (NOTHING, {}) if asked.rest.exception() else asked.rest.result()
    (head, _), (generation, said) = asked.first.result(), asked.rest.result()
    return joined(head, generation, request), said


def joined(head: Generation, generation: Generation, request: GenerationRequest) -> Generation:
    """Return the decode server's answer, with the first token's version from the prefill server's, `head`.
    Raises `EngineError` when they do not have the same first token."""
    if not len(generation.token_ids):
        return generation
    if head.token_ids[:1].tolist() != generation.token_ids[:1].tolist():
        raise EngineError(
            f"request {request.request_id}: the prefill server drew {head.token_ids.tolist()}, and the other "
            f"went on from {generation.token_ids[:1].tolist()}: are they one pair?"
        )
    versions = generation.policy_versions.copy()
    versions[0] = head.policy_versions[0]
    return replace(generation, policy_versions=versions)


async def _at_both(one: Awaitable[None], other: Awaitable[None]) -> None:
    for failure in await asyncio.gather(one, other, return_exceptions=True):
        if failure is not None:
            raise failure


async def together(one: Awaitable[One], other: Awaitable[Other]) -> tuple[One, Other]:
    """Return the results of both; the first failure ends the other and is raised."""
    tasks = asyncio.ensure_future(one), asyncio.ensure_future(other)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
