"""Rewards that other servers give: a function of yours behind HTTP, a reward model, and a judge."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from pathlib import Path
from typing import TypeVar

import structlog

from actors.episodes.task import JSON, Answer
from actors.rewards.base import LATER, InvalidRewardError, Result, RewardError, Scored, UnscoredError
from actors.rewards.builtin.message_text import readable, text_of
from actors.rewards.endpoint import BROKEN_OFF, Endpoint
from actors.settings.rewards import RewardConfig
from bus.errors import ConfigError
from storage.chats.stop_tokens import answer_end, answer_start, with_start
from storage.chats.template import ChatTemplate

ACCEPTED = 202
"""Status that says: the reward comes later."""


class Remote:
    """Posts each answer to a server, which returns its reward."""

    def __init__(self, config: RewardConfig) -> None:
        self._endpoint = Endpoint(config.remote, what="reward remote")

    async def __call__(self, answer: Answer) -> Result:
        """Return the number that the server answers, or its object's `reward` and the others as parts. An
        object without `reward` has parts only. Status 202 says that the reward comes later. Raises
        UnscoredError where the server refuses the answer, fails on it or is away."""
        reply = await self._endpoint.post(request_body(answer))
        return LATER if reply.status == ACCEPTED else _result(reply.body)

    async def close(self) -> None:
        await self._endpoint.close()


def request_body(answer: Answer) -> dict[str, JSON]:
    return {
        "task_id": answer.task_id,
        "prompt": list(answer.messages),
        "response": answer.text,
        "label": answer.label,
        "metadata": dict(answer.metadata),
        "finish_reason": answer.finish_reason,
        "token_count": answer.token_count,
    }


def _result(body: JSON) -> Result:
    if isinstance(body, Mapping):
        numbers = {name: _number(value) for name, value in body.items()}
        if "reward" not in numbers:
            return numbers
        return Scored(numbers.pop("reward"), numbers)
    return _number(body)


def _number(value: JSON) -> float:
    if isinstance(value, Real):
        return float(value)
    raise InvalidRewardError(f"reward remote: the server answered {value!r}, where a number is expected")


T = TypeVar("T")
LOADING_S = 600.0
"""Longest time in which the model may be loaded."""


class RewardModel:
    """Scores answers with a model in this process, one after another, in a thread of its own. The model is
    loaded when it is first needed."""

    def __init__(self, config: RewardConfig) -> None:
        assert config.reward_model.path is not None, "settings refuse the reward without it"
        self._path, self._device = config.reward_model.path, config.reward_model.device
        self._timeout_s = config.reward_timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward model")
        self._one_at_a_time = asyncio.Lock()
        self._score: Callable[[Answer], float] | None = None

    async def __call__(self, answer: Answer) -> float:
        """Return the score of the answer with its end, as the model was trained to read it. Raises
        `RewardError` where it takes longer than `reward_timeout_s`, `ConfigError` for a directory that has no
        such model."""
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


log = structlog.get_logger()
SHOWN = 200


class NoScoreError(UnscoredError):
    """No reply of the judge had a score that counts."""


class Judge:
    """Asks a model for a score, and asks again where its reply has none."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config.judge
        self._pattern = re.compile(config.judge.pattern)
        self._endpoint = Endpoint(config.judge, what="reward judge", path="/chat/completions")
        self.tokens = 0
        """Tokens that the endpoint counted, of prompts and replies."""

    async def __call__(self, answer: Answer) -> Scored:
        """Return the judge's score, scaled to [0, 1]. Raises UnscoredError where the endpoint refuses the
        answer, fails on it or is away, or no whole reply has a score within the bounds."""
        reply, cut_off = "", False
        for _ in range(self._config.attempts):
            reply, cut_off = await self._reply(answer)
            if not cut_off and (score := self._score(reply)) is not None:
                low, high = self._config.lowest, self._config.highest
                return Scored((score - low) / (high - low), {"judge_score": score})
        ending = f", which judge.max_tokens={self._config.max_tokens} cut off" if cut_off else ""
        raise NoScoreError(
            f"reward judge on task {answer.task_id}: none of {self._config.attempts} replies had a score in "
            f"[{self._config.lowest:g}, {self._config.highest:g}], the last{ending}: {reply[-SHOWN:]!r}"
        )

    async def _reply(self, answer: Answer) -> tuple[str, bool]:
        """Return what the judge replies, and whether that is cut off: then its last word is no verdict."""
        message = self._config.template.format(
            prompt=readable(answer.messages), label=answer.label or "", answer=answer.text
        )
        body: dict[str, JSON] = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }
        reply = (await self._endpoint.post(body)).body
        self._count_tokens(reply)
        return _content(reply)

    def _count_tokens(self, reply: JSON) -> None:
        usage = reply.get("usage") if isinstance(reply, Mapping) else None
        used = usage.get("total_tokens") if isinstance(usage, Mapping) else None
        most = self._config.max_total_tokens
        if isinstance(used, int) and used >= 0:
            self.tokens += used
        elif most is not None:
            raise RewardError("reward judge: the endpoint counts no tokens: leave out judge.max_total_tokens")
        if most is not None and self.tokens >= most:
            self._endpoint.spent = f"judge.max_total_tokens={most}"

    def _score(self, reply: str) -> float | None:
        """Return the last score that lies within the bounds; None where the last one does not, or is none."""
        found = [match[1] for match in self._pattern.finditer(reply)]
        try:
            score = float(found[-1])
        except (IndexError, TypeError, ValueError):  # TypeError: the group took no part in the match
            return None
        return score if self._config.lowest <= score <= self._config.highest else None

    async def close(self) -> None:
        await self._endpoint.close()


def _content(reply: JSON) -> tuple[str, bool]:
    """Return the text of the first choice of a chat completion, and whether its limit cut it off; no text
    where the server gave the answer up. Raises UnscoredError for another reply."""
    choices = reply.get("choices") if isinstance(reply, Mapping) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, Mapping) else None
    if not isinstance(first, Mapping) or not isinstance(message, Mapping):
        raise UnscoredError(f"reward judge: the endpoint answered no chat completion: {str(reply)[:SHOWN]!r}")
    if (ending := first.get("finish_reason")) in BROKEN_OFF:
        return "", False
    return text_of(message.get("content")), ending == "length"
