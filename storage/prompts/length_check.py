"""Finds, before the first lease, the prompts that are too long for the model."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from bus.codec import Json, decode
from bus.connection import Bus
from bus.errors import ConfigError
from bus.images import PlacedImage
from bus.messages import BlobRef, ModelFiles, Prompt
from bus.process.called_apart import called_apart
from bus.streams.blob_store import get_blob
from storage.images.chat import ImageChat, inlined
from storage.images.encoded import ImageError
from storage.images.reader import ImageReader
from storage.model_files.model_reading import (
    context_of,
    not_embedded,
    read_config,
    read_tokenizer,
    refuse_no_template,
    refusing,
)
from storage.model_files.packed_files import unbundle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 1024
TEMPLATE_REMEDY = "change the prompt, or the template in the model's directory"
LIMIT_S = 3600.0
"""Longest time of a check, which takes a minute for a million prompts."""
T = TypeVar("T")
Called = Callable[..., Awaitable[Any]]
"""Calls a check beside the event loop: `once`, or `asyncio.to_thread` where others may follow soon."""


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """A prompt that leaves no room for an answer in the model's context."""

    index: int
    """Number of the prompt, from 0."""
    problem: str
    """What is wrong with the prompt and what to do, for a human."""


async def once(check: Callable[..., T], *arguments: object) -> T:
    """Return what a check of prompts returns which a process does once, when it begins.

    Another process does it, unless transformers is loaded here anyway: transformers and torch would take a
    third of a gigabyte of a storage that lives for weeks."""
    if "transformers" in sys.modules:
        return await asyncio.to_thread(check, *arguments)
    return await called_apart(check, *arguments, limit_s=LIMIT_S, what="the check of the prompts")


async def check_lengths(
    bus: Bus, model: BlobRef, prompts: Sequence[Prompt], *, max_new_tokens: int, called: Called = once
) -> None:
    """Do `check_prompt_lengths` with the model files on the bus. Raises `BusError` when they are gone."""
    async with _files(bus, model) as directory:
        await called(check_prompt_lengths, prompts, directory, max_new_tokens)


async def lengths_exceeded(
    bus: Bus, model: BlobRef, prompts: Sequence[Prompt], *, max_new_tokens: int, called: Called = once
) -> list[int]:
    """Return the numbers of `long_prompts`, with the model files on the bus. Raises `BusError` when these are
    gone."""
    async with _files(bus, model) as directory:
        found: list[int] = await called(_numbers_of_long, prompts, directory, max_new_tokens)
        return found


def _numbers_of_long(prompts: Iterable[Prompt], model_directory: Path, max_new_tokens: int) -> list[int]:
    return [one.index for one in long_prompts(prompts, model_directory, max_new_tokens=max_new_tokens)]


async def check_measured(bus: Bus, model: BlobRef, measured: Mapping[str, Sequence[Prompt]]) -> None:
    """Do `check_measured_prompts` with the model files on the bus. Raises `BusError` when they are gone."""
    if any(measured.values()):
        async with _files(bus, model) as directory:
            await asyncio.to_thread(check_measured_prompts, measured, directory)


def check_measured_prompts(measured: Mapping[str, Sequence[Prompt]], model_directory: Path) -> None:
    """Raise `ConfigError` for a held-out prompt that shows an image which the model cannot see, or whose text
    it would take for one."""
    images = None
    if ImageReader.of(model_directory) is not None:
        images = ImageChat.of(model_directory, read_tokenizer(model_directory))
    for name, prompts in measured.items():
        for number, prompt in enumerate(prompts, start=1):
            try:
                _with_texts(prompt, images)
            except ImageError as error:
                raise ConfigError(f"prompt {number} of the {name}: {error}") from error


def _with_texts(prompt: Prompt, images: ImageChat | None) -> tuple[list[Json], list[PlacedImage]]:
    """Return the chat of a prompt, whose images have become text, and the images. Raises `ImageError`."""
    content = prompt.content
    chat: list[Json] = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if images is not None:
        images.refuse_marker(prompt.tools)
    return inlined(chat, images)


def check_prompt_lengths(prompts: Iterable[Prompt], model_directory: Path, max_new_tokens: int) -> None:
    """Raise `ConfigError` for the first prompt that leaves no room for `max_new_tokens` in the context, or
    that the model's chat template refuses."""
    for found in long_prompts(prompts, model_directory, max_new_tokens=max_new_tokens):
        raise ConfigError(found.problem)


def long_prompts(
    prompts: Iterable[Prompt], model_directory: Path, *, max_new_tokens: int
) -> Iterator[LongPrompt]:
    """Return the prompts that leave no room for `max_new_tokens` in the context. Raises `ConfigError` for a
    prompt that the model's chat template refuses, or with a token that the model does not embed."""
    from storage.chats.template import ChatRefusedError, ChatTemplate  # Jinja2 is slow to import

    hf_config, tokenizer = read_config(model_directory), read_tokenizer(model_directory)
    model = _Model(tokenizer, context_of(hf_config, model_directory), hf_config.get_text_config().vocab_size)
    refuse_no_template(tokenizer, model_directory)
    images = ImageChat.of(model_directory, tokenizer)
    template, rendered = ChatTemplate(tokenizer), list[_Rendered]()
    start = 0
    for prompt in prompts:
        number = start + len(rendered) + 1
        try:
            messages, shown = _with_texts(prompt, images)
            with refusing(f"prompt {number}: the model's chat template refuses it", TEMPLATE_REMEDY):
                text = template.render(messages, prompt.tools)
        except ImageError as error:
            raise ConfigError(f"prompt {number}: {error}") from error
        except ChatRefusedError as error:
            raise ConfigError(f"prompt {number}: the model's chat template refuses it: {error}") from error
        rendered.append(_Rendered(text, sum(image.stop - 1 for image in shown)))
        if len(rendered) == BATCH:
            yield from _long(rendered, start, model, max_new_tokens)
            start, rendered = start + BATCH, []
    if rendered:
        yield from _long(rendered, start, model, max_new_tokens)


class _Model(NamedTuple):
    tokenizer: "PreTrainedTokenizerBase"
    context: int
    vocabulary: int
    """Tokens that it embeds."""


class _Rendered(NamedTuple):
    text: str
    more: int
    """Tokens that images have beyond the one that stands for each in the text."""


def _long(rendered: list[_Rendered], start: int, model: _Model, max_new_tokens: int) -> Iterator[LongPrompt]:
    tokenizer, context, vocabulary = model
    encoded = tokenizer([text for text, _ in rendered], add_special_tokens=False)["input_ids"]
    for n, token_ids in enumerate(encoded):
        text, more = rendered[n]
        tokens = len(token_ids) + more
        if (largest := max(token_ids, default=0)) >= vocabulary:
            raise ConfigError(f"prompt {start + n + 1}: {not_embedded(tokenizer, largest, vocabulary)}")
        if tokens + max_new_tokens > context:
            shown = f"{more} of them of images, " if more else ""
            smaller = ", show smaller images (size in preprocessor_config.json)" if more else ""
            problem = (
                f"prompt {start + n + 1} has {tokens} tokens: {shown}with {max_new_tokens} new ones it "
                f"exceeds the model's context of {context} ({text[:60]!r}...): shorten it{smaller}, lower "
                'sampling.max_new_tokens, or leave such prompts out with data.long_prompts = "skip"'
            )
            yield LongPrompt(start + n, problem)


@asynccontextmanager
async def _files(bus: Bus, model: BlobRef) -> AsyncIterator[Path]:
    files = decode(await get_blob(bus, model), ModelFiles)
    with tempfile.TemporaryDirectory(prefix="sluice-model-") as directory:
        await asyncio.to_thread(unbundle, files, Path(directory))
        yield Path(directory)
