"""What a stand-in of an SGLang server does with adapters."""

import asyncio
import base64
import pickle
from collections import defaultdict
from typing import Any

from aiohttp import web

LOAD = "load_lora_adapter_from_tensors"
PATHS = ("v1/models", LOAD, "unload_lora_adapter", "abort_request")


class StandInAdapters:
    """Answers as 0.5.23 does, to what is asked of adapters and of requests for them."""

    def __init__(self) -> None:
        self.settings: dict[str, object] = {}
        """Its settings of adapters; without any it has no endpoint to load them."""
        self.loaded: dict[str, dict[str, Any]] = {}
        """What loaded each adapter that it has, by name, with `tensors`."""
        self.refuses = False
        self.loses_aborts = False
        """Whether it has lost the abort of each single request, which it passes on once."""
        self._aborted: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._in_progress: list[tuple[str, asyncio.Event]] = []
        """The adapter of each request, and what is set at its end."""
        self._changing = asyncio.Lock()
        """Held while an adapter is loaded, and until the requests of one that is unloaded have ended."""

    async def answer(self, path: str, body: dict[str, Any]) -> web.Response:
        if path == "abort_request":
            if body["abort_all"]:
                for aborted in self._aborted.values():
                    aborted.set()
            elif not self.loses_aborts:
                self._aborted[body["rid"]].set()
            return web.json_response({"success": True})
        if path == "v1/models":
            adapters = [{"id": name, "parent": "stand-in"} for name in self.loaded]
            return web.json_response({"data": [{"id": "stand-in", "parent": None}, *adapters]})
        async with self._changing:
            return await self._changed(path, body)

    async def _changed(self, path: str, body: dict[str, Any]) -> web.Response:
        name = body["lora_name"]
        if self.refuses or (path != LOAD and name not in self.loaded):
            return web.json_response({"success": False, "error_message": "out of memory"}, status=400)
        if path == LOAD:
            tensors = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
            self.loaded[name] = body | {"tensors": tensors}
            room = self.settings.get("max_loaded_loras")
            assert room is None or len(self.loaded) <= room, "SGLang would unload one that may be in use"
        else:
            del self.loaded[name]
            for ended in [ended for used, ended in self._in_progress if used == name]:
                await ended.wait()
        return web.json_response({"success": True})

    def refusal(self, body: dict[str, Any]) -> web.Response | None:
        """What a request for an adapter that is not there is answered."""
        name = body.get("lora_path")
        if name is None or name in self.loaded:
            return None
        message = f"Got LoRA adapter that has never been loaded: {name}"
        return web.json_response({"error": {"message": message}}, status=400)

    async def runs(self, body: dict[str, Any], running: asyncio.Event) -> bool:
        """Wait until the server runs; False where a request for an adapter was aborted before."""
        name = body.get("lora_path")
        if name is None:
            return await running.wait()
        self._in_progress.append((name, ended := asyncio.Event()))
        waits = [asyncio.create_task(event.wait()) for event in (running, self._aborted[body["rid"]])]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        aborted = waits[1].done()
        for wait in waits:
            wait.cancel()
        ended.set()
        return not aborted
