"""A server in the test's process that scores with a model of transformers and answers like SGLang 0.5.23."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Self

import torch
from aiohttp import web
from transformers import PreTrainedModel, PreTrainedTokenizerBase

LIMIT_S = 60.0
Spoil = Callable[[int, dict], web.Response | dict | Awaitable[web.Response | dict | None] | None]
"""Is given the number of a request to /generate, from 1, and the answer to be; returns another, or None."""


class ServedModel:
    """A context manager; its event loop has a thread of its own, since a step asks from a loop of its own."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *,
        spoil: Spoil | None = None, **facts: object,
    ) -> None:  # fmt: skip
        self.url = ""
        self.bodies: list[dict] = []
        """The requests to /generate."""
        self.most_at_once = 0
        self._at_once = 0
        self._model, self._tokenizer, self._spoil = model, tokenizer, spoil
        self._facts = {"model_path": "a-large-model", "is_generation": True} | facts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/generate", self._generate)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}  # of requests that hang
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response(self._facts)

    async def _server_info(self, _: web.Request) -> web.Response:
        longest = self._facts.get("max_req_input_len")
        return web.json_response(
            {
                "version": "0.5.23",
                "skip_tokenizer_init": self._tokenizer is None,
                **({} if longest is None else {"max_req_input_len": longest}),
            }
        )

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        number = len(self.bodies)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(0)  # others come in
        try:
            answer = self._answer(body)
            if self._spoil is not None and not isinstance(answer, web.Response):
                spoilt = self._spoil(number, answer)
                answer = (await spoilt if asyncio.iscoroutine(spoilt) else spoilt) or answer
            return answer if isinstance(answer, web.Response) else web.json_response(answer)
        finally:
            self._at_once -= 1

    def _answer(self, body: dict) -> dict | web.Response:
        ids, begin, vocab = body["input_ids"], body["logprob_start_len"], self._model.config.vocab_size
        if wrong := [token for token in ids if not 0 <= token < vocab]:
            message = f"The input_ids {wrong} contains values greater than the vocab size ({vocab})."
            return web.json_response({"error": {"message": message}}, status=400)
        with torch.inference_mode():
            logits = self._model(torch.tensor([ids])).logits[0, begin:-1].float()
        logprobs = logits.log_softmax(-1)
        texts = body["return_text_in_logprobs"]
        chosen = logprobs.gather(-1, torch.tensor(ids[begin + 1 :])[:, None])[:, 0].tolist()
        named = [token if token < vocab - 1 else 0 for token in ids[begin:]]  # as SGLang writes the last id
        answer = {
            "input_token_logprobs": [
                [logprob, token, self._tokenizer.decode([token]) if texts else None]
                for logprob, token in zip([None, *chosen], named, strict=True)
            ],
            "output_token_logprobs": [],
            "finish_reason": {"type": "length", "length": 0},
        }
        if count := body["top_logprobs_num"]:
            found = logprobs.topk(count)
            answer["input_top_logprobs"] = [None] + [
                [[value, token, None] for value, token in zip(values, tokens, strict=True)]
                for values, tokens in zip(found.values.tolist(), found.indices.tolist(), strict=True)
            ]
        return {"text": "", "meta_info": answer}
