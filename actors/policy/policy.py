"""The policy as an environment sees it: chat or tokens in, completions out, everything recorded."""

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from typing import Protocol

from actors.engines.base import Engine, GenerationRequest, Sampling
from actors.environments.base import DEFAULT_AGENT, AgentTrajectory, ChatMessage
from actors.policy.messages import Completion, Tool
from actors.policy.strand import Call, Strand, forked_from
from actors.policy.version_masking import without_older_versions
from bus.trajectory import DEFAULT_POLICY, End

PROMPTS_REMEMBERED = 512


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def apply_chat_template(
        self, conversation: list[ChatMessage], *, tools: list[Tool] | None,
        tokenize: bool, add_generation_prompt: bool,
    ) -> str:  # fmt: skip
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

    def encode_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None
    ) -> tuple[str, tuple[int, ...]]:
        """Return a chat rendered up to where the assistant starts to speak, as text and as tokens."""
        return self._encode_chat(json.dumps([list(messages), list(tools) if tools else None]))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of rendered text, which spells out its special tokens: none is added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _encode_json(self, chat: str) -> tuple[str, tuple[int, ...]]:
        messages, tools = json.loads(chat)
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        return text, tuple(self.encode(text))


class Policy:
    """Access to an engine for the agents of one rollout, which it records; `fresh` gives the next one.

    A call whose context continues an earlier one of the same agent grows that trajectory; any other context
    starts a new one: of a second agent, of a rewritten history, or forked from an earlier one whose prompt it
    shares. Sampled tokens are never re-tokenised. Each call may have an `agent`, a `sampling` of its own
    (`dataclasses.replace(policy.sampling, temperature=0.5)`) and say that it is not `trainable`, as that of a
    frozen opponent or a judge. Greedy turns (temperature 0) are recorded, but not trained: log-probs of a
    choice are not those of a distribution that was sampled.
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
        self._strands: list[Strand] = []
        self._turn_rewards: dict[int, float] = {}
        """Rewards of single turns, by the number of the completion."""

    def fresh(self, rollout_id: str) -> "Policy":
        """Return a policy with nothing recorded, which shares the engine and the remembered prompts."""
        policy = copy(self)
        policy._rollout_id, policy._completions, policy._strands = rollout_id, count(), []
        policy._turn_rewards = {}
        return policy

    async def chat(
        self, messages: Sequence[ChatMessage] | str, agent: str = DEFAULT_AGENT, *,
        tools: Sequence[Tool] | None = None, sampling: Sampling | None = None,
        trainable: bool = True, policy: str = DEFAULT_POLICY,
    ) -> Completion:  # fmt: skip
        """Answer a chat; a string is one user message. Raises EngineError.

        `policy` is the name of the policy that is trained on the agent's part, in a run that trains several.
        """
        if isinstance(messages, str):
            messages = ({"role": "user", "content": messages},)
        call = Call(next(self._completions), agent, sampling or self.sampling, trainable, policy)
        text, token_ids = self._format.encode_chat(messages, tools)
        for strand in self._of(call):
            if strand.rendered and text.startswith(strand.rendered):
                added = self._format.encode(text[len(strand.rendered) :])
                return await self._complete([*strand.tokens, *added], call, text)
        return await self._complete(token_ids, call, text)

    async def generate(
        self, token_ids: Sequence[int], agent: str = DEFAULT_AGENT, *,
        sampling: Sampling | None = None, trainable: bool = True, policy: str = DEFAULT_POLICY,
    ) -> Completion:  # fmt: skip
        """Continue tokens. Raises EngineError."""
        call = Call(next(self._completions), agent, sampling or self.sampling, trainable, policy)
        return await self._complete(token_ids, call, None)

    async def count_tokens(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None) -> int:
        """Return the number of tokens of a chat up to where the policy would answer; nothing is recorded."""
        return len(self._format.encode_chat(messages, tools)[1])

    def reward_turn(self, completion: Completion, reward: float) -> None:
        """Note the reward of this turn alone, beside that of the outcome."""
        self._turn_rewards[completion.number] = reward

    def trajectories(
        self, reward: float | Mapping[str, float], *,
        end: End | None = None, reward_components: Mapping[str, float] | None = None,
    ) -> tuple[AgentTrajectory, ...]:  # fmt: skip
        """Return all that was recorded, in order of first use.

        Args:
            reward: of the outcome, for all agents or by agent.
            end: why the episode has no more turns; by default each trajectory's last turn says it.
            reward_components: parts of the reward by name, for the record.
        """
        recorded = [
            strand.trajectory(
                reward[strand.agent] if isinstance(reward, Mapping) else reward,
                turn_rewards=self._turn_rewards,
                reward_components=reward_components or {},
                end=end,
            )
            for strand in self._strands
        ]
        if self._max_lag is None:
            return tuple(recorded)
        return tuple(without_older_versions(trajectory, self._max_lag) for trajectory in recorded)

    async def _complete(self, token_ids: Sequence[int], call: Call, rendered: str | None) -> Completion:
        request_id = f"{next(self._calls)}-{self._rollout_id}"  # none is another's prefix, as SGLang needs
        experts_from = self._experts_from(call, token_ids)
        request = GenerationRequest(request_id, token_ids, self._seeded(call), experts_from)
        generation = await self._engine.generate(request)
        strand = self._continued(call, token_ids)
        if strand is None:
            fork = forked_from(token_ids, self._of(call))
            self._strands.append(strand := Strand(len(self._strands), call.agent, call.policy, fork))
        strand.extend(token_ids, generation, call)
        if rendered is not None:
            strand.rendered = rendered + self._format.decode(
                generation.token_ids.tolist(), skip_special_tokens=False
            )
        text = self._format.decode(generation.token_ids.tolist())
        return Completion(
            text, generation.token_ids, generation.finish_reason, call.number, content=text,
            prompt_tokens=len(token_ids),
        )  # fmt: skip

    def _seeded(self, call: Call) -> Sampling:
        """Return the sampling of a call, whose seed is other than its siblings' and always the same."""
        name = f"{self._rollout_id}/{call.number}"
        digest = blake2b(name.encode(), digest_size=8).digest()
        return replace(call.sampling, seed=int.from_bytes(digest, "big") >> 1)

    def _experts_from(self, call: Call, token_ids: Sequence[int]) -> int | None:
        """First of the tokens whose experts are not recorded yet; None when none are."""
        if not self._routed_experts:
            return None
        strand = self._continued(call, token_ids)
        return 0 if strand is None else sum(map(len, strand.routed))

    def _continued(self, call: Call, token_ids: Sequence[int]) -> Strand | None:
        """Return the newest strand that `token_ids` continues."""
        for strand in self._of(call):
            if list(token_ids[: len(strand.tokens)]) == strand.tokens:
                return strand
        return None

    def _of(self, call: Call) -> list[Strand]:
        """Return the strands of the call's agent, the newest first."""
        whose = call.agent, call.policy
        return [strand for strand in reversed(self._strands) if (strand.agent, strand.policy) == whose]
