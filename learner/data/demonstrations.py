"""Batches of demonstrations for the supervised stage before reinforcement learning."""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from bus.codec import Json
from bus.errors import ConfigError
from bus.images import PlacedImage
from bus.messages import Prompt
from learner.config.batch import BatchConfig
from learner.config.warmup import WarmupConfig
from learner.data.packing import MicroBatch, Sample, pack
from storage.chats.stop_tokens import answer_end, answer_start
from storage.chats.template import ChatTemplate
from storage.images.chat import ImageChat, inlined
from storage.images.encoded import ImageError


class Demonstrations:
    """Prompt and response pairs in an order that depends only on the seed: a position is enough to resume."""

    def __init__(
        self,
        rows: Sequence[tuple[Prompt, str]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        context: int,
        seed: int,
        images: ImageChat | None = None,
    ) -> None:
        """`images` are those of a vision-language model. Raises `ConfigError` for a row that shows an image
        to another one."""
        self._rows = rows
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._start = answer_start(tokenizer)
        self._end = answer_end(tokenizer)
        self._context = context
        self._seed = seed
        self._images = images
        self._order: tuple[int, NDArray[np.int64]] | None = None
        """Latest epoch, and its order."""
        if images is None:
            for number, (prompt, _) in enumerate(rows):
                self._shown(prompt, number)

    def step(
        self, step: int, warmup: WarmupConfig, batch: BatchConfig, *, share: int = 0, shares: int = 1
    ) -> list[MicroBatch]:
        """Return the micro-batches of the `step`-th step, from 0, or of one of equal `shares` of it."""
        start = step * warmup.batch_size
        numbers = [self._index(start + n) for n in range(share, warmup.batch_size, shares)]
        if not numbers:
            return []
        rows = [self._rows[number] for number in numbers]
        shown = [self._shown(prompt, number) for number, (prompt, _) in zip(numbers, rows, strict=True)]
        prompts = [self._template.render(chat) for chat, _ in shown]
        prompt_ids = self._tokenizer(prompts, add_special_tokens=False)["input_ids"]
        responses = [self._written(response) for _, response in rows]
        response_ids = self._tokenizer(responses, add_special_tokens=False)["input_ids"]
        return pack(
            [
                self._sample(p, [*r, self._end], images)
                for p, r, (_, images) in zip(prompt_ids, response_ids, shown, strict=True)
            ],
            batch.token_budget,
        )

    def _written(self, response: str) -> str:
        """Return a response behind what the chat template begins an answer with, unless it has its own."""
        own = response.lstrip()
        begins_so = any(own.startswith(mark) for mark in re.findall(r"^\s*(<[^<>]+>)", self._start))
        return response if begins_so else self._start + response

    def _shown(self, prompt: Prompt, number: int) -> tuple[list[Json], list[PlacedImage]]:
        """Return the chat of a prompt, whose images have become text, and the images."""
        try:
            return inlined(_chat(prompt), self._images)
        except ImageError as error:
            raise ConfigError(f"demonstration {number} (from 0): {error}") from error

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._rows))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._rows))
        return int(self._order[1][offset])

    def _sample(self, prompt: list[int], response: list[int], shown: Sequence[PlacedImage]) -> Sample:
        images: tuple[PlacedImage, ...] = ()
        if self._images is not None:
            prompt, images = self._images.expanded(prompt, shown)
        length = len(prompt) + len(response)
        if length > self._context:
            text = self._tokenizer.decode(prompt)
            raise ConfigError(
                f"a demonstration has {length} tokens, the model's context is {self._context}: "
                f"{text!r}; shorten it"
            )
        mask = np.zeros(length, dtype=bool)
        mask[len(prompt) :] = True
        return Sample(
            token_ids=np.array([*prompt, *response], dtype=np.int32),
            loss_mask=mask,
            streams={},
            images=images,
        )


def _chat(prompt: Prompt) -> list[Json]:
    content = prompt.content
    return [{"role": "user", "content": content}] if isinstance(content, str) else content
