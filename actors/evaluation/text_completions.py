"""Chats put to an endpoint as one text to continue, for base models that answer no chats."""

from collections.abc import Mapping, Sequence
from itertools import count

from actors.engines.base import ChatReply, Sampling
from actors.episodes.task import JSON, ChatMessage
from actors.evaluation.chat_endpoint import ChatEndpoint, Question, finish_reason, sampled_by
from actors.policy.chat_format import ChatFormat, Tokenizer
from actors.policy.chat_messages import checked_messages
from actors.settings.evaluation import ChatEndpointConfig
from bus.errors import RequestRefusedError


class TextCompletions:
    """Asks for what follows a text: the chat in the run's template, or its contents alone. In the template
    the answer is taken apart as the policy's is, so tools may be called."""

    path = "/completions"

    def __init__(
        self, name: str, config: ChatEndpointConfig, chat_format: ChatFormat, *, added: str = ""
    ) -> None:
        """Take the settings of `actors.evaluation.endpoints.NAME`, the run's tokenizer, and the text of the
        token that it, and so the server, puts before each text: a template must not write it again."""
        self._added = added
        self._name = name
        self._stop = config.stop
        self._in_template = config.prompt == "template"
        self._format = chat_format
        self._numbers = count()

    async def question(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, JSON]] | None, sampling: Sampling
    ) -> Question:
        """Return what is asked for a chat. Raises `RequestRefusedError` where tools cannot be told of."""
        if tools and not self._in_template:
            raise RequestRefusedError(
                f"evaluation endpoint {self._name} is asked for texts that tell of no tools: set "
                f'actors.evaluation.endpoints.{self._name}.prompt="template"'
            )
        stop = [*dict.fromkeys([*sampling.stop, *self._stop])]
        prompt, in_reasoning = await self._format.in_thread(self._prompt, messages, tools)
        body: dict[str, JSON] = {"prompt": prompt, **sampled_by(sampling, stop=stop)}

        def read(choice: Mapping[str, JSON]) -> ChatReply | None:
            text = choice.get("text")
            if not isinstance(text, str):
                return None
            if not self._in_template:
                return ChatReply(text, None, (), finish_reason(choice))
            return self._taken_apart(text, in_reasoning, tools, choice)

        return Question(body, read)

    def _prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, JSON]] | None
    ) -> tuple[str, bool]:
        """Return the text to continue, and whether the answer begins inside of reasoning."""
        if self._in_template:
            text, in_reasoning = self._format.render_chat(messages, tools)
            return text.removeprefix(self._added), in_reasoning
        return "\n\n".join(str(one["content"]) for one in checked_messages(messages)), False

    def _taken_apart(
        self, text: str, in_reasoning: bool, tools: Sequence[Mapping[str, JSON]] | None,
        choice: Mapping[str, JSON],
    ) -> ChatReply:  # fmt: skip
        answer = self._format.read_text(
            text, in_reasoning=in_reasoning, tools=tools, number=next(self._numbers)
        )
        return ChatReply(
            content="\n".join(part for part in (answer.content, *answer.malformed_calls) if part),
            reasoning=answer.reasoning,
            tool_calls=tuple((call.id, call.name, call.arguments) for call in answer.tool_calls),
            finish_reason=finish_reason(choice),
        )


def chat_endpoints(
    configs: Mapping[str, ChatEndpointConfig], tokenizer: Tokenizer, tool_calls: str
) -> dict[str, ChatEndpoint]:
    """Return the endpoints of `actors.evaluation.endpoints`, by name. Raises `ConfigError`."""
    found = {}
    for name, config in configs.items():
        dialect = None
        if config.protocol == "completions":
            first = tokenizer.encode("", add_special_tokens=True)[:1]
            added = tokenizer.decode(first, skip_special_tokens=False) if first else ""
            dialect = TextCompletions(name, config, ChatFormat(tokenizer, tool_calls), added=added)
        found[name] = ChatEndpoint(name, config, dialect)
    return found
