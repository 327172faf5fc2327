"""A model behind somebody's OpenAI-compatible endpoint, which answers chats and takes no weights."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from actors.engines.base import ChatReply, Generation, GenerationRequest, Sampling
from actors.environments.base import JSON, ChatMessage
from actors.rewards.base import RewardError
from actors.rewards.endpoint import Endpoint
from bus.errors import EngineError, RequestRefusedError

if TYPE_CHECKING:
    import torch

    from actors.evaluation.config import ChatEndpointConfig

OWN_FIELDS = frozenset({"reasoning_content"})
"""Fields of messages that an endpoint need not know: some refuse what they do not."""
SHOWN = 200


class ChatEndpoint:
    """Asks `/chat/completions` of any server: vLLM, llama.cpp, a gateway, a company's models.

    It is an engine for what needs texts alone, such as an evaluation."""

    policy_version = 0
    waiting = 0

    def __init__(self, name: str, config: "ChatEndpointConfig") -> None:
        """Take the settings of `actors.evaluation.endpoints.NAME`.

        Raises `ConfigError` where its key is to come from a variable that is not set."""
        self.running = 0
        self.tokens_generated = 0
        """Tokens of answers, as the server counts them."""
        self._name = name
        self._config = config
        self._endpoint = Endpoint(config, what=f"evaluation endpoint {name}", path="/chat/completions")

    async def chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, JSON]] | None, sampling: Sampling
    ) -> ChatReply:
        """Return the answer to a chat. Raises EngineError where the server gives none."""
        body: dict[str, JSON] = {
            "model": self._config.model,
            "messages": [{k: v for k, v in one.items() if k not in OWN_FIELDS} for one in messages],
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            **({"top_p": sampling.top_p} if sampling.top_p < 1 else {}),
            **({"top_k": sampling.top_k} if sampling.top_k else {}),  # no field of OpenAI's own server
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
            **({"tools": list(tools)} if tools else {}),
        }
        self.running += 1
        try:
            reply = await self._endpoint.post(body)
        except RewardError as error:
            raise EngineError(str(error)) from error
        finally:
            self.running -= 1
        return self._read(reply.body)

    def _read(self, body: JSON) -> ChatReply:
        choices = body.get("choices") if isinstance(body, Mapping) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        message = first.get("message") if isinstance(first, Mapping) else None
        if (
            not isinstance(body, Mapping)
            or not isinstance(first, Mapping)
            or not isinstance(message, Mapping)
        ):
            raise EngineError(
                f"evaluation endpoint {self._name} answered no chat completion: {str(body)[:SHOWN]!r}"
            )
        usage = body.get("usage")
        counted = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
        self.tokens_generated += counted if isinstance(counted, int) else 0
        reasoning = message.get("reasoning_content")
        return ChatReply(
            content=str(message.get("content") or ""),
            reasoning=reasoning if isinstance(reasoning, str) else None,
            tool_calls=tuple(_calls(message.get("tool_calls"))),
            finish_reason="length" if first.get("finish_reason") == "length" else "stop",
        )

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
        """Close the connections."""
        await self._endpoint.close()


def _calls(given: JSON) -> list[tuple[str, str, str]]:
    """Return id, name and arguments of the tool calls of a message; what is none is left out."""
    found = []
    for call in given if isinstance(given, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            found.append((str(call.get("id") or ""), name, str(function.get("arguments") or "{}")))
    return found
