"""The reward `judge`: a language model behind an OpenAI-compatible endpoint scores answers."""

import re
from collections.abc import Mapping

import structlog

from actors.episodes.task import JSON, Answer
from actors.rewards.base import RewardError, Scored, UnscoredError
from actors.rewards.builtin.message_text import readable, text_of
from actors.rewards.endpoint import Endpoint
from actors.settings.rewards import RewardConfig

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
        answer, fails on it or is away, or no reply has a score within the bounds."""
        reply = ""
        for _ in range(self._config.attempts):
            reply = await self._reply(answer)
            if (score := self._score(reply)) is not None:
                low, high = self._config.lowest, self._config.highest
                return Scored((score - low) / (high - low), {"judge_score": score})
        raise NoScoreError(
            f"reward judge on task {answer.task_id}: none of {self._config.attempts} replies had a score in "
            f"[{self._config.lowest:g}, {self._config.highest:g}], the last: {reply[-SHOWN:]!r}"
        )

    async def _reply(self, answer: Answer) -> str:
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
        if isinstance(used, int):
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
        """Close the connections."""
        await self._endpoint.close()


def _content(reply: JSON) -> str:
    """Return the text of the first choice of a chat completion. Raises UnscoredError for another reply."""
    choices = reply.get("choices") if isinstance(reply, Mapping) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, Mapping) else None
    if not isinstance(message, Mapping):
        raise UnscoredError(f"reward judge: the endpoint answered no chat completion: {str(reply)[:SHOWN]!r}")
    return text_of(message.get("content"))
