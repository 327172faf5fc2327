"""Refuses prompts that are too long for the scratch model, whose tokenizer has one token per character."""

from collections.abc import Iterable

from bus.codec import Json
from bus.errors import ConfigError
from bus.messages import Prompt
from launch.settings.run_config import RunConfig


def scratch_tokens(prompt: Prompt) -> int:
    """Return the tokens of a prompt as the scratch model's chat template renders it: one for each character,
    one before each message, one behind each of the assistant's, and one that asks for an answer. Images are
    not counted."""
    content = prompt.content
    chat: list[Json] = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return 1 + sum(_tokens(message) for message in chat)


def _tokens(message: Json) -> int:
    if not isinstance(message, dict):
        return 0
    content = message.get("content")
    length = len(content) if isinstance(content, str) else 0
    return 1 + length + (message.get("role") == "assistant")


def refuse_long_for_scratch(prompts: Iterable[Prompt], config: RunConfig) -> None:
    """Raise `ConfigError` for the first prompt that leaves no room for an answer in the scratch model."""
    if config.data.long_prompts != "refuse":
        return
    context, limit = config.model.scratch.context, config.sampling.max_new_tokens
    for number, prompt in enumerate(prompts, start=1):
        if (tokens := scratch_tokens(prompt)) + limit > context:
            raise ConfigError(
                f"prompt {number} has {tokens} tokens of the scratch model, one a character: with {limit} "
                f"new ones it exceeds model.scratch.context={context}: raise that, lower "
                "sampling.max_new_tokens, "
                'name a model by --model.path, or leave such prompts out with data.long_prompts = "skip"'
            )
