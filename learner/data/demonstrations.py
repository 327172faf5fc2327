"""Demonstrations for the supervised stage before reinforcement learning, or pairs of them, as samples."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from heapq import nlargest

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from bus.codec import Json
from bus.errors import ConfigError
from bus.images import PlacedImage
from bus.messages import Prompt
from learner.data.packing import Sample
from storage.chats.stop_tokens import answer_end, answer_start, with_start
from storage.chats.template import ChatRefusedError, ChatTemplate
from storage.images.chat import ImageChat, inlined
from storage.images.encoded import ImageError
from storage.model_files.model_reading import not_embedded
from storage.prompt_files.dataset import is_trained

CHECKED = 500
"""First rows, and longest ones, that are looked at before a run."""
SHOWN = 200
"""Characters of a text that is too long."""


class Demonstrations:
    """Chats whose answers are trained, or pairs of such, in an order that depends only on the seed: a
    position is enough to resume."""

    def __init__(
        self,
        rows: Sequence[tuple[Prompt, str]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        context: int,
        vocabulary: int,
        seed: int,
        images: ImageChat | None = None,
        paired: bool = False,
    ) -> None:
        """`context` and `vocabulary` are the tokens that the model reads and those that it embeds. `rows` are
        prompts with a response, or with an empty one chats whose answers are trained, but for
        those with a `weight` of 0. `images` are those of a vision-language model. Where they are `paired`,
        rows 2 i and 2 i + 1 are drawn together and make one sequence each.

        Raises `ConfigError` for a row that shows an image to another one."""
        self._rows = rows
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._start = answer_start(tokenizer)
        self._end = answer_end(tokenizer)
        self._context = context
        self._vocabulary = vocabulary
        self._seed = seed
        self._images = images
        self._together = 1 + paired
        """Rows that are drawn together."""
        self._order: tuple[int, NDArray[np.int64]] | None = None
        """Latest epoch, and its order."""
        if images is None:
            for number, (prompt, _) in enumerate(rows):
                with self._naming(number):
                    self._shown(prompt)

    def step(self, step: int, batch_size: int, *, share: int = 0, shares: int = 1) -> list[Sample]:
        """Return the samples of the `step`-th batch, from 0, or of one of equal `shares` of it."""
        drawn = range(step * batch_size + share, (step + 1) * batch_size, shares)
        return self._samples([number for position in drawn for number in self._drawn(self._index(position))])

    def all(self, *, share: int, shares: int) -> list[Sample]:
        """Return the samples of all rows in their order, or of one of equal `shares` of them."""
        drawn = range(share, len(self._rows) // self._together, shares)
        return self._samples([number for index in drawn for number in self._drawn(index)])

    def check(self) -> None:
        """Raise `ConfigError` for a row that cannot be trained on, before the step that has it. The first
        rows and the longest are looked at, which takes seconds."""
        longest = nlargest(CHECKED, range(len(self._rows)), key=lambda number: len(str(self._rows[number])))
        self._samples(sorted({*longest, *range(min(CHECKED, len(self._rows)))}))

    def _drawn(self, index: int) -> range:
        return range(index * self._together, (index + 1) * self._together)

    def _samples(self, numbers: Sequence[int]) -> list[Sample]:
        """Return these rows as tokens; all texts are made tokens at once, each by itself."""
        chats: list[tuple[int, _Chat]] = []
        for number in numbers:
            with self._naming(number):
                found = list(self._chats(number))
                if self._together > 1 and len(found) > 1:
                    raise ConfigError(
                        "the chat template writes an earlier answer otherwise in a longer chat, so that it "
                        "is no single sequence: give one answer behind the prompt"
                    )
                chats += [(number, chat) for chat in found]
        texts = [text for _, chat in chats for text, _ in chat.parts]
        if not texts:
            return []
        tokens = iter(self._tokenizer(texts, add_special_tokens=False)["input_ids"])
        samples = []
        for number, chat in chats:
            with self._naming(number):
                samples.append(self._sample(chat, tokens))
        return samples

    def _chats(self, number: int) -> Iterator["_Chat"]:
        """Yield what is trained of a row: one sequence, or one more for each answer behind which the chat
        template writes otherwise what came before, as templates do that leave earlier thoughts out."""
        prompt, response = self._rows[number]
        messages, images = self._shown(prompt)
        if response:
            yield _Chat(
                [(self._rendered(messages, prompt), False), (with_start(response, self._start), True)], images
            )
            return
        begun: list[tuple[str, bool]] = []
        for place, message in enumerate(messages):
            if not is_trained(message):
                continue
            before = self._rendered(messages[:place], prompt)
            written = "".join(text + (self._end_text if answer else "") for text, answer in begun)
            if begun and not before.startswith(written):
                yield _Chat(begun, images)
                begun, written = [], ""
            begun += [(before[len(written) :], False), (self._answer(messages, place, before, prompt), True)]
        yield _Chat(begun, images)

    def _rendered(self, messages: Sequence[Json], prompt: Prompt, *, go_on: bool = True) -> str:
        return self._template.render(messages, prompt.tools, go_on=go_on)

    def _answer(self, messages: Sequence[Json], place: int, before: str, prompt: Prompt) -> str:
        """Return the text of an answer in a chat, without its end."""
        message = messages[place]
        assert isinstance(message, dict), "it was read as one"
        content = message.get("content")
        if isinstance(content, str) and not (message.keys() & {"tool_calls", "reasoning_content"}):
            return with_start(content, self._start)
        rendered = self._rendered(messages[: place + 1], prompt, go_on=False)
        answer, found, _ = rendered.removeprefix(before).rpartition(self._end_text)
        if (
            not rendered.startswith(before)
            or not found
            or not all(name in answer for name in _called(message))
        ):
            raise ConfigError(
                f"the chat template does not write message {place} (from 0) behind the chat before it with "
                "all its calls, so that its tokens are not known: give its content as text alone, with the "
                "calls in it"
            )
        return answer

    @contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        try:
            yield
        except (ConfigError, ChatRefusedError, ImageError) as error:
            of_pair = f", {('chosen', 'rejected')[number % 2]}" if self._together > 1 else ""
            index = number // self._together
            raise ConfigError(f"demonstration {index} (from 0){of_pair}: {error}") from error

    @cached_property
    def _end_text(self) -> str:
        return str(self._tokenizer.decode([self._end]))

    def _shown(self, prompt: Prompt) -> tuple[list[Json], list[PlacedImage]]:
        """Return the chat of a prompt, whose images have become text, and the images."""
        return inlined(_chat(prompt), self._images)

    def _index(self, position: int) -> int:
        length = len(self._rows) // self._together
        epoch, offset = divmod(position, length)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(length)
        return int(self._order[1][offset])

    def _sample(self, chat: "_Chat", tokens: Iterator[list[int]]) -> Sample:
        """Return a chat as tokens; `tokens` are those of its parts, and then of others."""
        ids: list[int] = []
        mask: list[bool] = []
        images: tuple[PlacedImage, ...] = ()
        for place, (_, is_answer) in enumerate(chat.parts):
            of_part = next(tokens)
            if place == 0 and self._images is not None:
                try:
                    of_part, images = self._images.expanded(of_part, chat.images)
                except ImageError as error:
                    raise ConfigError(f"it shows images behind its first answer: {error}") from error
            ids += [*of_part, self._end] if is_answer else of_part
            mask += [is_answer] * (len(ids) - len(mask))
        if len(ids) > self._context:
            text = "".join(text for text, is_answer in chat.parts if not is_answer)
            raise ConfigError(
                f"it has {len(ids)} tokens, the model's context is {self._context}: {text[:SHOWN]!r}; "
                "shorten it"
            )
        if (largest := max(ids)) >= self._vocabulary:
            raise ConfigError(not_embedded(self._tokenizer, largest, self._vocabulary))
        return Sample(
            token_ids=np.array(ids, dtype=np.int32), loss_mask=np.array(mask), streams={}, images=images
        )


@dataclass(frozen=True)
class _Chat:
    parts: Sequence[tuple[str, bool]]
    """Texts of the chat in order, and whether each is an answer, which its end follows."""
    images: Sequence[PlacedImage]
    """Images of its first part."""


def _called(message: Mapping[str, Json]) -> list[str]:
    calls = message.get("tool_calls")
    functions = (
        [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    )
    return [str(function.get("name")) for function in functions if isinstance(function, dict)]


def _chat(prompt: Prompt) -> list[Json]:
    content = prompt.content
    return [{"role": "user", "content": content}] if isinstance(content, str) else content
