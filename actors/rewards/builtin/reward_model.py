"""The reward `reward_model`: the score of a model of transformers with one scalar head."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from actors.episodes.task import Answer
from actors.rewards.base import RewardError
from actors.settings.rewards import RewardConfig
from bus.errors import ConfigError
from storage.chats.stop_tokens import answer_end, answer_start, with_start
from storage.chats.template import ChatTemplate

T = TypeVar("T")
LOADING_S = 600.0
"""Longest time in which the model may be loaded."""


class RewardModel:
    """Scores answers with a model in this process, one after another, in a thread of its own.

    The model is loaded when it is first needed."""

    def __init__(self, config: RewardConfig) -> None:
        assert config.reward_model.path is not None, "settings refuse the reward without it"
        self._path, self._device = config.reward_model.path, config.reward_model.device
        self._timeout_s = config.reward_timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward model")
        self._one_at_a_time = asyncio.Lock()
        self._score: Callable[[Answer], float] | None = None

    async def __call__(self, answer: Answer) -> float:
        """Return the score of the answer with its end, as the model was trained to read it.

        Raises `RewardError` where it takes longer than `reward_timeout_s`, `ConfigError` for a directory that
        has no such model."""
        async with self._one_at_a_time:
            if self._score is None:
                loading, what = lambda: scoring(self._path, self._device), f"loading {self._path}"
                self._score = await self._in_thread(loading, LOADING_S, what)
            score, what = self._score, f"task {answer.task_id}: the score of {self._path}"
            return await self._in_thread(lambda: score(answer), self._timeout_s, what)

    async def _in_thread(self, work: Callable[[], T], timeout_s: float, what: str) -> T:
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.wait_for(running, timeout_s)
        except TimeoutError as error:
            raise RewardError(f"{what} took longer than {timeout_s:g} s") from error

    async def close(self) -> None:
        """End the thread when its work is done."""
        self._thread.shutdown(wait=False)


def scoring(path: Path, device: str) -> Callable[[Answer], float]:
    """Return the function that scores with the model in `path`. Raises `ConfigError` where there is none."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"reward_model.path={path} has no config.json: give the directory of a model")
    import torch  # the actor of another reward does without
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            path, output_loading_info=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"reward_model.path={path} cannot be read by transformers: {error}") from error
    if model.num_labels != 1 or loaded["missing_keys"]:
        raise ConfigError(
            f"reward_model.path={path} has {model.num_labels} labels and lacks the weights "
            f"{sorted(loaded['missing_keys'])}, and a reward is one number of a whole model: train one with "
            "launch local --pairs FILE --warmup.loss.type reward_model"
        )
    model = model.eval().to(device)
    template, start, end = ChatTemplate(tokenizer), answer_start(tokenizer), answer_end(tokenizer)

    @torch.inference_mode()
    def score(answer: Answer) -> float:
        messages, tools = ([dict(one) for one in each] for each in (answer.messages, answer.tools))
        asked = template.render(messages, tools)
        parts = tokenizer([asked, with_start(answer.text, start)], add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([[*parts[0], *parts[1], end]], device=device)
        return float(model(tokens).logits[0, 0])

    return score
