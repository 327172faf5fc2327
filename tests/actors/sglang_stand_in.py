"""What the engine uses of an SGLang server, over HTTP: it generates at once, and can hang."""

import asyncio
import base64
import json
import pickle
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from actors.engines.sglang.client.weight_labels import version_of, weights_label
from actors.engines.sglang.in_server.sluice_changes import APPLY, apply_2
from actors.engines.sglang.in_server.sluice_digests import EXPECT, expect_1
from bus.errors import EngineError
from tests.actors.gloo_rank import GlooRank
from tests.actors.stand_in_adapters import PATHS, StandInAdapters
from tests.actors.tiny import request

TOKEN = 5


class Copying(torch.nn.Module):
    """A model that loads weights as SGLang does the plain ones."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.state = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in state.items()}
        for name, parameter in self.state.items():
            self.register_parameter(name, parameter)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.state[name].data.copy_(tensor)


class Receiving(torch.nn.Module):
    """A model that keeps what it is told to load."""

    def __init__(self) -> None:
        super().__init__()
        self.received: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.received |= dict(weights)


class StandIn:
    """Answers as 0.5.23 does; `said` is every path that was asked for, in order."""

    breaks_off = True
    """Whether the connection breaks behind these pieces."""
    longest_prompt = 4091
    tensor_ranks = 1
    replicas = 1
    joins_within_s = 60.0
    altered = ""
    """Name of a tensor that comes with a bit flipped."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.connections: defaultdict[object, list[str]] = defaultdict(list)
        """The paths that were asked for over each connection, by the address it came from."""
        self.versions: list[str | None] = []
        """Version of each request that carried weights."""
        self.version = "default"
        self.sglang = "0.5.23"
        self.refuses_weights = False
        self.custom_weight_loader: list[str] | None = None
        self.weights: dict[str, torch.Tensor] = {}
        """What it was given in files and in requests, and where its loader is called."""
        self.updates: list[dict[str, Any]] = []
        """The bodies of requests that begin an update or carry weights, each with its `path`."""
        self.streams = False
        self.pieces: list[dict[str, object]] = []
        """Said instead of a generation to who wants a stream."""
        self.piece_sent = asyncio.Event()
        self.goes_on = asyncio.Event()
        """What a stream waits for between its pieces and its break."""
        self.updating = False
        """Between /begin_weight_update and /end_weight_update."""
        self.running = asyncio.Event()
        """Cleared while it is paused or hangs."""
        self.running.set()
        self.url = ""
        self._runner: web.AppRunner | None = None
        self.role = "null"
        """`prefill` or `decode` for half of a pair."""
        self.work: dict[str, int] = {}
        """What it says of the work on each answer."""
        self.retractions = 0
        """Times that a request was put aside for want of memory."""
        self.asked: list[dict[str, Any]] = []
        """The bodies of requests to generate."""
        self.architectures = ["Qwen3ForCausalLM"]
        self.speculation: str | None = None
        self.kept_sets: dict[str, int] = {"sampling_mask_max_tokens": 4096}
        """The setting of the largest set of kept tokens that it tells; older versions have none."""
        self.draft: str | None = None
        """The path of its draft model."""
        self.update_sessions = True
        self.loads: list[dict[str, int]] = []
        """Load of each replica; without any it does not tell."""
        self.model = Receiving()
        """Has what the learner sent."""
        self.answers_early = False
        """As with CUDA, before it has what the learner sends."""
        self.receiving: list[asyncio.Task[None]] = []
        self.groups: dict[str, GlooRank] = {}
        self.lora = StandInAdapters()

    @property
    def received(self) -> dict[str, torch.Tensor]:
        return self.model.received

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:  # noqa: C901  # a case for each path
        path = request.match_info["path"]
        self.said.append(path)
        self.connections[request.transport and request.transport.get_extra_info("peername")].append(path)
        body = await request.json() if request.can_read_body else {}
        if path.startswith(("begin_weight_update", "update_weights_from")):
            self.updates.append(body | {"path": path})
        match path:
            case "model_info":
                return web.json_response(
                    {
                        "weight_version": self.version,
                        "model_path": "stand-in",
                        "architectures": self.architectures,
                    }
                )
            case "server_info":
                return web.json_response(
                    {
                        "version": self.sglang,
                        "max_req_input_len": self.longest_prompt,
                        "tp_size": self.tensor_ranks,
                        "dp_size": self.replicas,
                        "model_path": "stand-in",
                        "speculative_algorithm": self.speculation,
                        "speculative_draft_model_path": self.draft,
                        "custom_weight_loader": self.custom_weight_loader,
                        "device": "cpu",
                        "incremental_streaming_output": self.streams,
                        **self.lora.settings,
                        **self.kept_sets,
                        "disaggregation_mode": self.role,
                        "disaggregation_bootstrap_port": 8998,
                    }
                )
            case "openapi.json":
                paths = {"/begin_weight_update": {}} if self.update_sessions else {}
                paths |= {"/load_lora_adapter_from_tensors": {}} if self.lora.settings else {}
                return web.json_response({"paths": paths | ({"/v1/loads": {}} if self.loads else {})})
            case "v1/loads":
                return web.json_response({"loads": self.loads})
            case "generate":
                self.asked.append(body)
                if refusal := self.lora.refusal(body):
                    return refusal
                if not await self.lora.runs(body, self.running):
                    return web.json_response(self._generated(2, "abort"))
                return await self._generating(request, body)
            case "health_generate":
                await self.running.wait()
            case "pause_generation":
                self.running.clear()
            case "continue_generation":
                self.running.set()
            case "init_weights_update_group" | "update_weights_from_distributed":
                return await self._in_group(path, body)
            case "destroy_weights_update_group":
                self.groups.pop(body["group_name"], None)
            case _ if path in PATHS:
                return await self.lora.answer(path, body)
            case "begin_weight_update" | "end_weight_update":
                return self._session(begins=path == "begin_weight_update")
            case "update_weights_from_disk" | "update_weights_from_tensor":
                if not self.refuses_weights:
                    self._take(body)
                return self._updated(body["weight_version"])
        return web.json_response({"success": True})

    def _take(self, body: dict[str, Any]) -> None:
        if directory := body.get("model_path"):
            for file in Path(directory).glob("*.safetensors"):
                self.weights |= load_file(file)
            return
        named = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        if body.get("load_format") == EXPECT:
            expect_1(self.model, named)
            return
        if body.get("load_format") != APPLY:
            self.weights |= dict(named)
            return
        model = Copying(self.weights)
        apply_2(model, named)
        self.weights = {name: tensor.detach() for name, tensor in model.state.items()}

    async def _in_group(self, path: str, body: dict[str, object]) -> web.Response:
        name = body["group_name"]
        try:
            if path == "init_weights_update_group":
                self.groups[name] = await asyncio.to_thread(GlooRank, body, self.joins_within_s)
                return web.json_response({"success": True})
            self.receiving.append(asyncio.create_task(self._receive(body, after=self.receiving[-1:])))
            if not self.answers_early:
                await self.receiving[-1]
        except (RuntimeError, ValueError) as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return self._updated(body["weight_version"])

    async def _receive(self, body: dict[str, Any], after: list[asyncio.Task[None]]) -> None:
        if after:
            await asyncio.wait(after)
        received = await asyncio.to_thread(self.groups[body["group_name"]].receive, body)
        if self.altered in received:
            received[self.altered].reshape(-1).view(torch.uint8)[0] ^= 1
        self.model.load_weights(received.items())

    def _session(self, *, begins: bool) -> web.Response:
        if self.updating == begins:
            return web.json_response({"success": False, "message": "wrong order"}, status=400)
        self.updating = begins
        return web.json_response({"success": True})

    def _updated(self, version: str | None) -> web.Response:
        if self.refuses_weights:
            return web.json_response({"success": False, "message": "out of memory"})
        self.versions.append(version and str(version_of(version)))
        self.version = version or self.version
        return web.json_response({"success": True})

    async def _generating(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return web.json_response(self._generated(body["sampling_params"]["max_new_tokens"]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        self.piece_sent.set()
        await self.goes_on.wait()
        if not self.breaks_off:
            await asyncio.sleep(0.01)  # SGLang ends a stream in a packet of its own
            await response.write(b"data: [DONE]\n\n")
            return response
        assert request.transport is not None
        request.transport.abort()
        return response

    def _generated(self, count: int, end: str = "length") -> dict[str, object]:
        count = 1 if self.role == "prefill" else count
        meta = {
            **self.work,
            "num_retractions": self.retractions,
            "finish_reason": {"type": end, "length": count},
            "input_token_logprobs": [[None, TOKEN, None]],
            "output_token_logprobs": [[-1.0, TOKEN, None]] * count,
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": count}],
        }
        return {"output_ids": [TOKEN] * count, "meta_info": meta}


STATE = {"large": torch.ones(64, 8), "small": torch.ones(3)}
TIMEOUT_S = 60


async def has_failed(engine):
    async with asyncio.timeout(TIMEOUT_S):
        while not engine.failure:  # noqa: ASYNC110 - the fleet asks it, too
            await asyncio.sleep(0.02)
    with pytest.raises(EngineError, match="has stopped"):
        await engine.check_health()
    with pytest.raises(EngineError, match="has stopped"):
        await engine.generate(request("late", [1]))
    with pytest.raises(EngineError, match="has stopped"):
        await engine.load_weights(STATE, 9)


def answer(**meta):
    return {
        "output_ids": [5, 6, 7],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 3},
            "output_token_logprobs": [[-0.5, 5, None], [-1.5, 6, None], [-2.5, 7, None]],
            "weight_version": weights_label(4),
            "weight_versions": [
                {"version": weights_label(3), "start": 0, "end": 2},
                {"version": weights_label(4), "start": 2, "end": 3},
            ],
            **meta,
        },
    }


def later(state, share):
    """The same with about a share of the elements moved."""
    return {
        name: torch.where(torch.rand(tensor.shape) < share, tensor * 1.5 + 0.25, tensor)
        for name, tensor in state.items()
    }
