"""SGLang's HTTP endpoints, as versions 0.5.17 to 0.5.23 have them."""

import asyncio
import io
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self

import aiohttp
import torch

from actors.engines.base import Generation, GenerationRequest, WorkCounts
from actors.engines.expert_routing import Routing
from actors.engines.sglang.client.answers import (
    BAD_REQUEST,
    NOT_JSON,
    Streamed,
    read_answer,
    read_events,
    read_prompt_logprobs,
    reading,
    work_of,
)
from actors.engines.sglang.client.request_bodies import probe_body, request_body
from actors.engines.sglang.client.sent_images import as_json
from actors.engines.sglang.client.server_facts import ServerFacts
from actors.engines.sglang.client.tensor_files import on_host, pickled
from actors.engines.sglang.client.weight_labels import version_of, weights_label
from actors.engines.sglang.in_server.sluice_changes import APPLY
from actors.engines.sglang.in_server.sluice_digests import EXPECT
from bus.errors import EngineError, RequestRefusedError, tells
from bus.waiting import bounded, left_s
from bus.weight_requests import OfferedBucket


class UnreachableError(EngineError):
    """There was no connection, or it broke: the server may be dead."""


class StatusError(EngineError):
    """The server answered with another status than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class AdapterMissingError(EngineError):
    """The server does not have the adapter of a request, such as one that was started again."""


class TooSlowError(EngineError):
    """There was no answer in time: the server may still be at it."""


IDLE_AGAIN_S = 0.05
"""Time until a server is asked again whether it is idle."""
LOOK_S = 20.0
"""Time in which a server that runs tells what it is."""
SHORT_S = 30.0
"""Time limit of requests that a working server answers at once."""
KEPT_S = 0.5
"""Longest time that a connection lies idle. SGLang closes one after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE), and a
proxy in front of a server perhaps after one second."""
AT_ONCE_BYTES = 64 << 10
"""Size of a body up to which it is sent at once. A larger one is sent in pieces, as a file is: in bytes it
would hold up the loop."""
STREAM_END_S = 1.0
"""Longest wait for the end of a stream behind a whole answer."""
OK = 200
IS_JSON = {"Content-Type": "application/json"}
LOAD_ADAPTER = "/load_lora_adapter_from_tensors"
"""/load_lora_adapter reads files, which a server with arbitrary first weights (load_format=dummy) refuses."""
NONE_OPEN = (400, 404)
"""No update is open; it has no such sessions (0.5.17)."""
Json = dict[str, Any]


class SglangClient:
    """One server. Every method raises `EngineError` when the server refuses, is gone or is too slow."""

    def __init__(self, url: str, session: aiohttp.ClientSession, generating: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._generating = generating
        self.work_counts = WorkCounts()

    @classmethod
    def connect(cls, url: str) -> Self:
        """Return a client whose requests to generate use connections again, which costs a fifth less of an
        actor's time than a new one for each short answer.

        A server may close a kept connection as it is used. That costs a generation a look at the server; an
        update or a pause would cost the engine, so each other request has a connection of its own."""
        connectors = (
            aiohttp.TCPConnector(limit=0, force_close=True),
            aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
        )
        return cls(url, *(aiohttp.ClientSession(connector=one, trust_env=False) for one in connectors))

    async def close(self) -> None:
        await self._session.close()
        await self._generating.close()

    async def facts(self, meeting: Json | None = None) -> ServerFacts:
        """Ask what the server is and can do, one token included; refuses what is not SGLang. Half of a pair
        is refused too without `meeting`: what its requests say of the other half."""
        model = await self._call("GET", "/model_info")
        server = await self._call("GET", "/server_info")
        if "weight_version" not in model or "version" not in server:
            raise EngineError(f"{self.url} answers, but is not an SGLang server of version 0.5.17 or later")
        role = str(server.get("disaggregation_mode") or "null")
        if role != "null" and meeting is None:
            raise EngineError(
                f"{self.url} is the {role} server of a pair: name both, the decode server with "
                "actors.engine.url and the prefill server with actors.engine.disaggregation.prefill_url"
            )
        paths = (await self._call("GET", "/openapi.json")).get("paths", {})
        answer = await self._call("POST", "/generate", probe_body() | (meeting or {}))
        return ServerFacts(
            version=str(server["version"]),
            model=str(model["model_path"]),
            architectures=tuple(model.get("architectures") or ()),
            longest_prompt=server.get("max_req_input_len"),
            update_sessions="/begin_weight_update" in paths,
            reports_spans="weight_versions" in answer.get("meta_info", {}),
            returns_experts="routed_experts" in answer.get("meta_info", {}),
            streams=bool(server.get("incremental_streaming_output")),
            speculation=str(server.get("speculative_algorithm") or ""),
            tensor_ranks=int(server.get("tp_size", 1)),
            device="cpu" if server.get("device") == "cpu" else "cuda",
            replicas=int(server.get("dp_size", 1)) * int(server.get("pp_size", 1)),
            settings=(server,),
            role=role,
            tells_loads="/v1/loads" in paths,
            loads_adapters=LOAD_ADAPTER in paths,
            bootstrap_port=int(server.get("disaggregation_bootstrap_port") or 0),
        )

    async def generate(
        self, request: GenerationRequest, *, rid: str, salt: str, timeout_s: float,
        routing: Routing | None = None, streamed: Streamed | None = None, adapter: str = "",
    ) -> Generation:  # fmt: skip
        """Continue a prompt; requests with another `salt` or `adapter` share no cached prefix with it. With
        `streamed` the server is asked for tokens as it draws them, and they are put there. Raises
        `AdapterMissingError` when it has no such adapter, and `RequestRefusedError` for what never fits."""
        body = request_body(request, rid=rid, salt=salt, adapter=adapter)
        try:
            generation, _ = await self.answer(
                body, request, timeout_s=timeout_s, routing=routing, streamed=streamed
            )
        except RequestRefusedError as error:
            if adapter and tells(error, adapter):
                raise AdapterMissingError(str(error)) from error
            raise
        return generation

    async def answer(
        self, body: Json, request: GenerationRequest, *, timeout_s: float,
        routing: Routing | None = None, streamed: Streamed | None = None,
    ) -> tuple[Generation, Mapping[str, Any]]:  # fmt: skip
        """Return what `body` makes of a request: as `generate`, and what the server says besides."""
        if streamed is None:
            answer = await self._call("POST", "/generate", body, timeout_s=timeout_s)
            generation, meta = read_answer(answer, request, routing), answer["meta_info"]
        else:
            await self._stream("/generate", body, streamed, timeout_s)
            generation, meta = streamed.generation(routing), streamed.meta
        with reading(request):
            self.work_counts = self.work_counts.plus(work_of(meta))
        return generation, meta

    async def score(self, request: GenerationRequest, *, timeout_s: float, adapter: str = "") -> list[float]:
        """Return the nats of a prompt's tokens but the first and those of images; nothing is used that the
        server has cached, of prefixes or of images. Raises `OtherWeightsError` for weights of others."""
        rid = f"score-{uuid.uuid4().hex}"
        body = {**request_body(request, rid=rid, salt=rid, adapter=adapter), "logprob_start_len": 0}
        answer = await self._call("POST", "/generate", body, timeout_s=timeout_s)
        with reading(request):
            version_of(answer["meta_info"]["weight_version"])
            return read_prompt_logprobs(answer, request)

    async def loads(self, *, timeout_s: float) -> Json:
        return await self._call("GET", "/v1/loads", timeout_s=timeout_s)

    async def abort(self, rid: str) -> None:
        """End a request, and any other whose rid begins so."""
        await self._call("POST", "/abort_request", {"rid": rid, "abort_all": False})

    async def abort_all(self) -> None:
        await self._call("POST", "/abort_request", {"rid": "", "abort_all": True})

    async def healthy(self, timeout_s: float) -> bool:
        """Return whether the server still generates; costs a token when it is idle, and takes a second."""
        try:
            await self._call("GET", "/health_generate", timeout_s=timeout_s)
        except EngineError:
            return False
        return True

    async def pause(self, mode: Literal["in_place", "retract"]) -> None:
        """Stop generating; what is in flight waits."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def load_files(
        self, directory: Path, policy_version: int, *, flush: bool, timeout_s: float
    ) -> None:
        """Take the weights in a directory's safetensors files. Unless generation is paused, it waits for the
        end of what is in flight. Without `flush` the cached prefixes stay."""
        body = {"model_path": str(directory), "load_format": "auto", **_update(policy_version, flush=flush)}
        await self._update("/update_weights_from_disk", body, timeout_s)

    async def load_tensors(
        self,
        buckets: Iterable[Mapping[str, torch.Tensor]],
        policy_version: int,
        facts: ServerFacts,
        *,
        flush: bool,
        timeout_s: float,
    ) -> None:
        """Take tensors from the bodies of requests, one for each bucket; the last sets the version. All of it
        takes no longer than `timeout_s`."""
        async with bounded(timeout_s, f"{self.url} did not take all tensors"):
            waiting = list(buckets)
            async with self.updating(facts, timeout_s):
                for bucket in waiting:
                    last = bucket is waiting[-1]
                    body = {
                        "serialized_named_tensors": [pickled([*on_host(bucket).items()])]
                        * facts.tensor_ranks,
                        **_for_policy(facts),
                        **_update(policy_version, flush=flush, last=last),
                    }
                    await self._update("/update_weights_from_tensor", body, timeout_s)

    async def load_changes(
        self, file: Path, policy_version: int, facts: ServerFacts, *, flush: bool, timeout_s: float
    ) -> None:
        """Have the server's process write in what changed since its last weights, from a file."""
        path = torch.frombuffer(bytearray(str(file).encode()), dtype=torch.uint8)
        body = {
            "serialized_named_tensors": [pickled([("path", path)])] * facts.tensor_ranks,
            "load_format": APPLY,
            **_for_policy(facts),
            **_update(policy_version, flush=flush),
        }
        async with self.updating(facts, timeout_s):
            await self._update("/update_weights_from_tensor", body, timeout_s)

    @asynccontextmanager
    async def updating(self, facts: ServerFacts, timeout_s: float) -> AsyncIterator[None]:
        """Inside, the server takes tensors. It hears of the end in any case: else no other could begin."""
        if not facts.update_sessions:
            yield
            return
        await self._update("/begin_weight_update", _for_policy(facts), timeout_s)
        try:
            yield
        except BaseException:
            with suppress(EngineError):  # what failed is raised; a server that is dead has nothing open
                await self._update("/end_weight_update", {}, SHORT_S)
            raise
        await self._update("/end_weight_update", {}, timeout_s)

    async def end_open_update(self) -> None:
        """End an update that somebody began and did not end: as long as it is open, no other may begin."""
        try:
            await self._call("POST", "/end_weight_update", {})
        except StatusError as error:
            if error.status not in NONE_OPEN:
                raise

    async def release(self, timeout_s: float) -> None:
        """Free the device, once nothing runs: the server would die of being asked while something does."""
        end_s = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._flushed():  # noqa: ASYNC110 - a server has no event for it
                    await asyncio.sleep(IDLE_AGAIN_S)
        except TimeoutError:
            raise EngineError(f"{self.url} was not idle within {timeout_s:g} s") from None
        await self._call("POST", "/release_memory_occupation", {}, timeout_s=left_s(end_s))

    async def retake(self, tags: tuple[str, ...], timeout_s: float) -> None:
        """Take memory of these kinds back; what was in it is lost."""
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)}, timeout_s=timeout_s)

    async def _flushed(self) -> bool:
        """Return whether the cached prefixes are gone, which takes an idle server."""
        try:
            await self._call("POST", "/flush_cache")
        except UnreachableError:
            raise
        except EngineError:
            return False
        return True

    async def join_group(self, offered: OfferedBucket, timeout_s: float) -> None:
        """Have the server's ranks meet the learner in a group; nothing is generated meanwhile."""
        body = {
            "master_address": offered.host,
            "master_port": offered.port,
            "rank_offset": offered.first_rank,
            "world_size": offered.world_size,
            "group_name": offered.group,
            "backend": offered.backend,
        }
        await self._update("/init_weights_update_group", body, timeout_s)

    async def leave_group(self, name: str) -> None:
        await self._update("/destroy_weights_update_group", {"group_name": name}, SHORT_S)

    async def expect(self, offer: Sequence[OfferedBucket], facts: ServerFacts, timeout_s: float) -> None:
        """Have the server refuse, until all of the offer is there, tensors that have not its digests; with an
        empty offer, take any again."""
        named = ((b.names, b.digests) for b in offer)
        digests = {name: sha.hex() for names, all_ in named for name, sha in zip(names, all_, strict=True)}
        text = torch.frombuffer(bytearray(json.dumps(digests).encode()), dtype=torch.uint8)
        body = {
            "serialized_named_tensors": [pickled([("digests", text)])] * facts.tensor_ranks,
            "load_format": EXPECT,
            **_for_policy(facts),
            **_update(0, flush=False, last=False),
        }
        await self._update("/update_weights_from_tensor", body, timeout_s)

    async def receive(
        self, offered: OfferedBucket, facts: ServerFacts, *, last: bool, flush: bool, timeout_s: float
    ) -> None:
        """Take the tensors that the learner sends in the group; the last ones set the version."""
        body = {
            "names": offered.names,
            "dtypes": offered.dtypes,
            "shapes": offered.shapes,
            "group_name": offered.group,
            **(_for_policy(facts) if facts.update_sessions else {}),  # before, no draft model gets them
            **_update(offered.policy_version, flush=flush, last=last),
        }
        await self._update("/update_weights_from_distributed", body, timeout_s)

    async def adapters(self) -> list[str]:
        """Return the names of all adapters that it has: models with another one under them."""
        models = (await self._call("GET", "/v1/models")).get("data", [])
        return [str(model.get("id")) for model in models if model.get("parent")]

    async def load_adapter(self, body: bytes, timeout_s: float) -> None:
        """Load an adapter from tensors in JSON, while it generates."""
        await self._call("POST", LOAD_ADAPTER, body, timeout_s=timeout_s)

    async def unload_adapter(self, name: str, timeout_s: float) -> None:
        """Unload an adapter, once no request has it; it loads no other meanwhile."""
        await self._call("POST", "/unload_lora_adapter", {"lora_name": name}, timeout_s=timeout_s)

    async def weight_version(self) -> str:
        return str((await self._call("GET", "/model_info")).get("weight_version", ""))

    async def checksums(self) -> dict[str, str]:
        """Return a checksum of each of its parameters on the first rank, by the server's own names."""
        answer = await self._call("POST", "/weights_checker", {"action": "checksum"}, timeout_s=120.0)
        [rank, *_] = answer["ranks"]
        return dict(rank["checksums"])

    async def _update(self, path: str, body: Json, timeout_s: float) -> None:
        answer = await self._call("POST", path, body, timeout_s=timeout_s)
        if not answer.get("success"):
            raise EngineError(f"{self.url}{path}: {answer.get('message', answer)}")

    async def _stream(self, path: str, body: Json, streamed: Streamed, timeout_s: float) -> None:
        async with (
            self._answered("POST", path, {**body, "stream": True}, timeout_s) as response,
            aclosing(read_events(response.content.iter_any())) as chunks,
        ):
            async for chunk in chunks:
                if said := chunk.get("error"):
                    said = said if isinstance(said, dict) else {"message": said}
                    failure = RequestRefusedError if said.get("code") == BAD_REQUEST else EngineError
                    raise failure(f"{self.url}{path}: {said.get('message', said)}")
                streamed.add(chunk)
                if streamed.complete:
                    await _to_its_end(response)
                    return
            raise UnreachableError(f"{self.url}{path} broke off in the middle of an answer")

    async def _call(
        self, method: str, path: str, body: Json | bytes | None = None, *, timeout_s: float = SHORT_S
    ) -> Json:
        """Return the answer to a request; {} when it has no JSON object in it."""
        async with self._answered(method, path, body, timeout_s) as response:
            data = await response.read()
        try:
            answer = json.loads(data)
        except NOT_JSON:
            return {}
        return answer if isinstance(answer, dict) else {}

    @asynccontextmanager
    async def _answered(
        self, method: str, path: str, body: Json | bytes | None, timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response of status 200, whose content may be read within the time that is left."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        sent: Json = {}
        if body is not None:
            said = body if isinstance(body, bytes) else as_json(body)
            sent = {"data": said if len(said) <= AT_ONCE_BYTES else io.BytesIO(said), "headers": IS_JSON}
        session = self._generating if path == "/generate" else self._session
        try:
            async with session.request(method, self.url + path, timeout=timeout, **sent) as response:
                if response.status != OK:
                    reason = (await response.read()).decode(errors="replace")[:500]
                    message = f"{self.url}{path} answered with status {response.status}: {reason}"
                    if response.status == BAD_REQUEST and path == "/generate":  # too long, for instance
                        raise RequestRefusedError(message)
                    raise StatusError(message, response.status)
                yield response
        except TimeoutError as error:
            raise TooSlowError(f"{self.url}{path} did not answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            reason = str(error) or type(error).__name__
            raise UnreachableError(
                f"no answer from an SGLang server at {self.url}{path}: {reason}"
            ) from error


async def facts_at(url: str) -> ServerFacts:
    """Return what the server is and can do that runs there. Raises EngineError without its answer."""
    client = SglangClient.connect(url)
    try:
        async with bounded(LOOK_S, f"{url} did not answer"):
            return await client.facts()
    finally:
        await client.close()


def _update(policy_version: int, *, flush: bool, last: bool = True) -> Json:
    """Return what every update says; of several parts the last sets the version."""
    return {
        "weight_version": weights_label(policy_version) if last else None,
        "flush_cache": flush and last,
        "abort_all_requests": False,  # in flight they stay
    }


def _for_policy(facts: ServerFacts) -> Json:
    """Return what keeps tensors from a draft model with weights of its own; any other is to have them too."""
    if not facts.has_own_draft:
        return {}
    return {"selector": "target"} if facts.update_sessions else {"disable_draft_model": True}


async def _to_its_end(response: aiohttp.ClientResponse) -> None:
    """Take what is left of a stream whose answer is whole, without which its connection is not used again."""
    if response.content.is_eof():
        return
    with suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(STREAM_END_S):
            await response.content.read()
