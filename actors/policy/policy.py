"""The policy as an environment sees it: chat or tokens in, completions out, everything recorded."""

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from typing import Protocol

import numpy as np

from actors.engines.base import Engine, FinishReason, Generation, GenerationRequest, Sampling
from actors.environments.base import AgentTrajectory, ChatMessage, Turn
from actors.policy.version_masking import without_older_versions

PROMPTS_REMEMBERED = 512


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def apply_chat_template(
        self, conversation: list[ChatMessage], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """Render a chat as text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Turn text into token ids."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Turn token ids into text."""


class ChatFormat:
    """A tokenizer and its chat template; it renders and tokenises a group's prompt once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._encode_chat = lru_cache(PROMPTS_REMEMBERED)(self._encode_json)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[str, tuple[int, ...]]:
        """Return a chat rendered up to where the assistant starts to speak, as text and as tokens."""
        return self._encode_chat(json.dumps(list(messages)))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of rendered text, which spells out its special tokens: none is added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _encode_json(self, messages: str) -> tuple[str, tuple[int, ...]]:
        text = self._tokenizer.apply_chat_template(
            json.loads(messages), tokenize=False, add_generation_prompt=True
        )
        return text, tuple(self.encode(text))


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What the policy answered."""

    text: str
    """Without special tokens."""
    token_ids: np.ndarray
    """int32 [N], as sampled."""
    finish_reason: FinishReason


@dataclass(slots=True)
class _Strand:
    """A growing trajectory: a context and what was sampled in it."""

    agent: str
    rendered: str | None
    """The chat so far as text, if it came from one."""
    tokens: list[int] = field(default_factory=list)
    sampled: list[tuple[int, Generation]] = field(default_factory=list)
    """Completions and where they start."""

    @property
    def routed(self) -> list[np.ndarray]:
        """The experts of its tokens, from the first on, in pieces."""
        pieces = (generation.routed_experts for _, generation in self.sampled)
        return [piece for piece in pieces if piece is not None]

    def extend(self, prompt: Sequence[int], generation: Generation) -> None:
        """Append what `prompt` adds to the tokens so far, and a completion."""
        self.tokens.extend(prompt[len(self.tokens) :])
        self.sampled.append((len(self.tokens), generation))
        self.tokens.extend(generation.token_ids.tolist())

    def trajectory(self, reward: float) -> AgentTrajectory:
        """Return the recording as arrays."""
        length = len(self.tokens)
        mask, logprobs = np.zeros(length, np.bool_), np.zeros(length, np.float32)
        versions = np.full(length, -1, np.int32)
        turns = []
        for start, generation in self.sampled:
            span = slice(start, start + len(generation.token_ids))
            mask[span], logprobs[span] = True, generation.logprobs
            versions[span] = generation.policy_versions
            turns.append(Turn(span.start, span.stop, generation.finish_reason))
        return AgentTrajectory(
            token_ids=np.array(self.tokens, np.int32),
            loss_mask=mask,
            behaviour_logprobs=logprobs,
            policy_versions=versions,
            agent=self.agent,
            reward=reward,
            finish_reason=turns[-1].finish_reason,
            turns=tuple(turns),
            routed_experts=self._experts(),
        )

    def _experts(self) -> np.ndarray | None:
        """Of all tokens but the last, or None: an engine that ended could not tell its latest."""
        pieces = self.routed
        complete = sum(map(len, pieces)) == len(self.tokens) - 1
        return np.concatenate(pieces) if pieces and complete else None


class Policy:
    """Access to an engine for the agents of one rollout, which it records; `fresh` gives the next one.

    A call whose context continues an earlier one of the same agent grows that trajectory; any other
    context (a rewritten history, a second agent) starts a new one. Sampled tokens are never re-tokenised.
    With `mask_older_versions`, tokens that lag the trajectory's newest version by more are not trained on.
    With `routed_experts` the engine is asked where it sent the tokens, once for each token."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, sampling: Sampling, *,
        mask_older_versions: int | None = None, routed_experts: bool = False,
    ) -> None:  # fmt: skip
        self.sampling = sampling
        self._max_lag = mask_older_versions
        self._routed_experts = routed_experts
        self._engine = engine
        self._format = ChatFormat(tokenizer)
        self._calls = count()
        self._rollout_id = "rollout"
        self._completions = count()
        self._strands: list[_Strand] = []

    def fresh(self, rollout_id: str) -> "Policy":
        """Return a policy with nothing recorded, which shares the engine and the remembered prompts."""
        policy = copy(self)
        policy._rollout_id, policy._completions, policy._strands = rollout_id, count(), []
        return policy

    async def chat(self, messages: Sequence[ChatMessage] | str, agent: str = "solver") -> Completion:
        """Answer a chat; a string is one user message. Raises EngineError."""
        if isinstance(messages, str):
            messages = ({"role": "user", "content": messages},)
        text, token_ids = self._format.encode_chat(messages)
        for strand in self._of(agent):
            if strand.rendered and text.startswith(strand.rendered):
                added = self._format.encode(text[len(strand.rendered) :])
                return await self._complete([*strand.tokens, *added], agent, text)
        return await self._complete(token_ids, agent, text)

    async def generate(self, token_ids: Sequence[int], agent: str = "solver") -> Completion:
        """Continue tokens. Raises EngineError."""
        return await self._complete(token_ids, agent, None)

    def trajectories(self, reward: float | Mapping[str, float]) -> tuple[AgentTrajectory, ...]:
        """Return all that was recorded, in order of first use; `reward` is for all agents or by agent."""
        recorded = [
            strand.trajectory(reward[strand.agent] if isinstance(reward, Mapping) else reward)
            for strand in self._strands
        ]
        if self._max_lag is None:
            return tuple(recorded)
        return tuple(without_older_versions(trajectory, self._max_lag) for trajectory in recorded)

    async def _complete(self, token_ids: Sequence[int], agent: str, rendered: str | None) -> Completion:
        request_id = f"{next(self._calls)}-{self._rollout_id}"  # none is another's prefix, as SGLang needs
        experts_from = self._experts_from(agent, token_ids)
        request = GenerationRequest(request_id, token_ids, self._seeded(), experts_from)
        generation = await self._engine.generate(request)
        strand = self._continued(agent, token_ids)
        if strand is None:
            self._strands.append(strand := _Strand(agent, None))
        strand.extend(token_ids, generation)
        if rendered is not None:
            strand.rendered = rendered + self._format.decode(
                generation.token_ids.tolist(), skip_special_tokens=False
            )
        text = self._format.decode(generation.token_ids.tolist())
        return Completion(text, generation.token_ids, generation.finish_reason)

    def _seeded(self) -> Sampling:
        """The sampling of the next completion, whose seed is other than its siblings' and always the same."""
        name = f"{self._rollout_id}/{next(self._completions)}"
        digest = blake2b(name.encode(), digest_size=8).digest()
        return replace(self.sampling, seed=int.from_bytes(digest, "big") >> 1)

    def _experts_from(self, agent: str, token_ids: Sequence[int]) -> int | None:
        """First of the tokens whose experts are not recorded yet; None when none are."""
        if not self._routed_experts:
            return None
        strand = self._continued(agent, token_ids)
        return 0 if strand is None else sum(map(len, strand.routed))

    def _continued(self, agent: str, token_ids: Sequence[int]) -> _Strand | None:
        """Return the newest strand that `token_ids` continues."""
        for strand in self._of(agent):
            if list(token_ids[: len(strand.tokens)]) == strand.tokens:
                return strand
        return None

    def _of(self, agent: str) -> list[_Strand]:
        return [strand for strand in reversed(self._strands) if strand.agent == agent]
