"""Checks before the first lease that all prompts are short enough for the model."""

import asyncio
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bus.blobs import get_blob
from bus.codec import decode
from bus.connection import Bus
from bus.errors import ConfigError
from bus.messages import BlobRef, ModelFiles, Prompt
from storage.weights.model_files import unbundle

BATCH = 1024


async def check_lengths(bus: Bus, model: BlobRef, prompts: Iterable[Prompt], *, max_new_tokens: int) -> None:
    """Do `check_prompt_lengths` with the model files on the bus. Raises `BusError` when they are gone."""
    files = decode(await get_blob(bus, model), ModelFiles)
    with tempfile.TemporaryDirectory(prefix="sluice-model-") as directory:
        await asyncio.to_thread(unbundle, files, Path(directory))
        await asyncio.to_thread(check_prompt_lengths, prompts, Path(directory), max_new_tokens=max_new_tokens)


def check_prompt_lengths(prompts: Iterable[Prompt], model_directory: Path, *, max_new_tokens: int) -> None:
    """Raise `ConfigError` for the first prompt that leaves no room for `max_new_tokens` in the context, or
    that the model's chat template refuses."""
    from jinja2.exceptions import TemplateError  # transformers renders chat templates with it
    from transformers import AutoConfig, AutoTokenizer  # slow to import, needed once

    context = AutoConfig.from_pretrained(model_directory).get_text_config().max_position_embeddings
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    rendered: list[str] = []
    start = 0
    for prompt in prompts:
        content = prompt.content
        chat = [{"role": "user", "content": content}] if isinstance(content, str) else content
        try:
            rendered.append(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        except (TemplateError, ValueError) as error:
            number = start + len(rendered) + 1
            raise ConfigError(f"prompt {number}: the model's chat template refuses it: {error}") from error
        if len(rendered) == BATCH:
            _check(rendered, start, tokenizer, context, max_new_tokens)
            start, rendered = start + BATCH, []
    if rendered:
        _check(rendered, start, tokenizer, context, max_new_tokens)


def _check(texts: list[str], start: int, tokenizer: object, context: int, max_new_tokens: int) -> None:
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]  # type: ignore[operator]  # untyped library
    for n, token_ids in enumerate(encoded):
        if len(token_ids) + max_new_tokens > context:
            raise ConfigError(
                f"prompt {start + n + 1} has {len(token_ids)} tokens: with {max_new_tokens} new ones it "
                f"exceeds the model's context of {context} ({texts[n][:60]!r}...): shorten it or lower "
                "sampling.max_new_tokens"
            )
