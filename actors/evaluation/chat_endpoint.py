"""A model behind somebody's OpenAI-compatible endpoint, which answers chats and takes no weights."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from actors.engines.base import ChatReply, Generation, GenerationRequest, Sampling
from actors.episodes.task import JSON, ChatMessage
from actors.rewards.base import RewardError
from actors.rewards.builtin.message_text import text_of
from actors.rewards.endpoint import BROKEN_OFF, Endpoint
from bus.errors import EngineError, RequestRefusedError
from bus.trajectory import FinishReason

if TYPE_CHECKING:
    import torch

    from actors.settings.evaluation import ChatEndpointConfig

OWN_FIELDS = frozenset({"reasoning_content"})
"""Fields of messages that an endpoint need not know: some refuse what they do not."""
SHOWN = 200


class Question(NamedTuple):
    """What an endpoint is asked."""

    body: dict[str, JSON]
    """Fields of the request, besides the model's name."""
    read: Callable[[Mapping[str, JSON]], ChatReply | None]
    """Reads the first choice of the answer; None where that is none."""


class EndpointDialect(Protocol):
    """How chats are put to an endpoint."""

    path: str

    async def question(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, JSON]] | None, sampling: Sampling
    ) -> Question:
        """Return what is asked for a chat. Raises EngineError for one that cannot be put so."""


class ChatCompletions:
    """Asks in messages."""

    path = "/chat/completions"

    async def question(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, JSON]] | None, sampling: Sampling
    ) -> Question:
        body: dict[str, JSON] = {
            "messages": [{k: v for k, v in one.items() if k not in OWN_FIELDS} for one in messages],
            **sampled_by(sampling, stop=sampling.stop),
            **({"tools": list(tools)} if tools else {}),
        }
        return Question(body, _chat_reply)


def sampled_by(sampling: Sampling, *, stop: Sequence[str]) -> dict[str, JSON]:
    return {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        **({"top_p": sampling.top_p} if sampling.top_p < 1 else {}),
        **({"top_k": sampling.top_k} if sampling.top_k else {}),  # no field of OpenAI's own server
        **({"stop": list(stop)} if stop else {}),
    }


class ChatEndpoint:
    """Asks any server of OpenAI's protocol: vLLM, llama.cpp, a gateway, a company's models. It is an engine
    for what needs texts alone, such as an evaluation."""

    policy_version = 0
    waiting = 0

    def __init__(
        self, name: str, config: "ChatEndpointConfig", dialect: EndpointDialect | None = None
    ) -> None:
        """Take the settings of `actors.evaluation.endpoints.NAME`; without a `dialect` it is asked for chats.
        Raises `ConfigError` where its key is to come from a variable that is not set."""
        self.running = 0
        self.tokens_generated = 0
        """Tokens of answers, as the server counts them."""
        self._name = name
        self._config = config
        self._dialect = dialect or ChatCompletions()
        self._endpoint = Endpoint(config, what=f"evaluation endpoint {name}", path=self._dialect.path)

    async def chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, JSON]] | None, sampling: Sampling
    ) -> ChatReply:
        """Return the answer to a chat. Raises EngineError where the server gives none."""
        question = await self._dialect.question(messages, tools, sampling)
        self.running += 1
        try:
            reply = await self._endpoint.post({"model": self._config.model, **question.body})
        except RewardError as error:
            raise EngineError(str(error)) from error
        finally:
            self.running -= 1
        return self._read(question, reply.body)

    def _read(self, question: Question, body: JSON) -> ChatReply:
        choices = body.get("choices") if isinstance(body, Mapping) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        reply = question.read(first) if isinstance(first, Mapping) else None
        if reply is None or not isinstance(body, Mapping):
            raise EngineError(
                f"evaluation endpoint {self._name} answered no completion of {self._dialect.path}: "
                f"{str(body)[:SHOWN]!r}"
            )
        usage = body.get("usage")
        counted = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
        self.tokens_generated += counted if isinstance(counted, int) else 0
        return reply

    async def start(self) -> None:
        """Do nothing: connections open with the first request."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Raise RequestRefusedError: it takes chats, and no token ids."""
        raise RequestRefusedError(
            f"evaluation endpoint {self._name} answers chats and takes no tokens: an environment that calls "
            "policy.generate needs a model that is one of actors.opponents, with a path"
        )

    async def load_weights(self, state: Mapping[str, "torch.Tensor"], policy_version: int) -> float:
        """Raise EngineError: its model stays as it is."""
        raise EngineError(f"evaluation endpoint {self._name} takes no weights: its model stays as it is")

    async def abort(self, request_id: str) -> None:
        """Do nothing: who leaves a chat closes its connection."""

    async def close(self) -> None:
        await self._endpoint.close()


def _chat_reply(choice: Mapping[str, JSON]) -> ChatReply | None:
    message = choice.get("message")
    if not isinstance(message, Mapping):
        return None
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return ChatReply(
        content=text_of(message.get("content")),
        reasoning=reasoning if isinstance(reasoning, str) else None,
        tool_calls=tuple(_calls(message.get("tool_calls"))),
        finish_reason=finish_reason(choice),
    )


def finish_reason(choice: Mapping[str, JSON]) -> FinishReason:
    """Return how an answer ended. Raises `EngineError` for one that its server gave up."""
    if (reason := choice.get("finish_reason")) in BROKEN_OFF:
        raise EngineError(f"the endpoint broke the answer off: its finish_reason is {reason!r}")
    return "length" if reason == "length" else "stop"


def _calls(given: JSON) -> list[tuple[str, str, str]]:
    """Return id, name and arguments of the tool calls of a message; what is none is left out."""
    found = []
    for call in given if isinstance(given, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            given = function.get("arguments") or {}
            arguments = given if isinstance(given, str) else json.dumps(given)
            found.append((str(call.get("id") or ""), name, arguments))
    return found
