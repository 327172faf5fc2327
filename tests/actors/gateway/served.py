"""A gateway over a scripted engine, reached by real HTTP."""

import asyncio
import json
import string
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.engines.base import Sampling
from actors.gateway.server import Gateway
from actors.gateway.session import Session
from actors.policy.policy import Policy
from actors.settings.gateway import GatewayConfig
from benchmarks.scripted_engine import ScriptedEngine

END = "<|im_end|>"
SPECIALS = ("<|pad|>", END, "<|im_start|>", "<|unk|>")
TEMPLATE = (
    "{% if tools %}<|im_start|>tools{% for t in tools %} {{ t['function']['name'] }}{% endfor %}<|im_end|>"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>"
    '{"name": "{{ c[\'function\'][\'name\'] }}", "arguments": '
    "{% if c['function']['arguments'] is string %}{{ c['function']['arguments'] }}"
    "{% else %}{{ c['function']['arguments'] | tojson }}{% endif %}}</tool_call>{% endfor %}"
    "<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def printable_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; chats look like <|im_start|>role text<|im_end|>."""
    vocabulary = {token: n for n, token in enumerate((*SPECIALS, *string.printable))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token=END,
        unk_token="<|unk|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


TOKENIZER = printable_tokenizer()
Answering = Callable[[str], str]


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def script(answering: Answering) -> Callable[[Sequence[int]], list[int]]:
    """Answer the text of a prompt with a text."""
    return lambda tokens: encoded(answering(TOKENIZER.decode(list(tokens))) + END)


@dataclass
class Served:
    gateway: Gateway
    session: Session
    policy: Policy
    engine: ScriptedEngine
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.gateway.url_of(self.session)

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, dict]:
        """Send a body, given as JSON or as bytes; return the status and the answer."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(f"{self.url}{path}", data=raw, headers=names) as answer:
            return answer.status, await answer.json()

    async def chat(self, *texts: str, **more: object) -> tuple[int, dict]:
        return await self.post("/v1/chat/completions", chat_body(*texts, **more))

    async def pay(self, raw: bytes) -> tuple[int, dict]:
        """Post a reward as whoever leads the episode does."""
        async with self.http.post(self.gateway.reward_url_of(self.session), data=raw) as answer:
            return answer.status, await answer.json()

    async def talked(self) -> "Served":
        """Have the agent ask something, so that there is something to pay for."""
        assert (await self.chat("hi"))[0] == 200
        return self

    def tokens(self) -> list[np.ndarray]:
        return [trajectory.token_ids for trajectory in self.policy.trajectories(0.0)]


def chat_body(*texts: str, **more: object) -> dict:
    """A conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"model": "any", "messages": messages, **more}


@asynccontextmanager
async def served(answering: Answering = lambda _: "fine", **settings: object) -> AsyncIterator[Served]:
    """Serve one session."""
    engine = ScriptedEngine(script(answering))
    await engine.start()
    gateway = Gateway(GatewayConfig(**settings))
    await gateway.start()
    policy = Policy(engine, TOKENIZER, Sampling(max_new_tokens=128)).fresh("t.0")
    try:
        async with aiohttp.ClientSession() as http, gateway.session(policy, "t.0") as session:
            yield Served(gateway, session, policy, engine, http)
    finally:
        await gateway.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    """Let the event loop turn until the condition holds."""
    try:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - engine and session have no event for it
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"waited in vain for {what}") from None
