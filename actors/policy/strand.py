"""One trajectory while it grows: a context and what was sampled in it, token by token as the engine said."""

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from actors.engines.base import Generation, Sampling
from actors.episodes.episode import AgentTrajectory, Fork
from actors.policy.conversation import Conversation
from bus.config import LEAST_TEMPERATURE
from bus.errors import EngineError
from bus.images import PlacedImage
from bus.kept_sets import KeptSets
from bus.trajectory import End, FinishReason, Turn

ENDS: dict[FinishReason, End] = {"stop": "completed", "length": "length", "abort": "cancelled"}
"""How a trajectory ended, by its last turn, where the environment does not say."""


@dataclass(frozen=True, slots=True)
class Call:
    """What was asked of the policy for one completion, besides its context."""

    number: int
    agent: str
    policy: str
    sampling: Sampling
    trainable: bool

    @property
    def is_trained(self) -> bool:
        return self.trainable and self.sampling.temperature >= LEAST_TEMPERATURE


@dataclass(slots=True)
class Strand:
    """A growing trajectory of one agent."""

    number: int
    agent: str
    policy: str
    fork: Fork | None
    """The earlier strand that its context departs from, if any."""
    departures: Mapping[str, int] = field(default_factory=dict)
    """How many messages of its conversation were repeated in another way."""
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    """An array, which compares and copies in a moment and has 4 bytes a token: a context of 128k tokens is
    compared and copied in each turn."""
    sampled: list[tuple[int, Call, Generation]] = field(default_factory=list)
    """Completions, where they start and how they were asked for."""
    images: tuple[PlacedImage, ...] = ()
    _conversation: Conversation | None = None
    _answered: Callable[[], Conversation] | None = None

    @property
    def conversation(self) -> Conversation | None:
        """Return the messages that its tokens came from; None where there are none."""
        if self._answered is not None:
            self._conversation, self._answered = self._answered(), None
        return self._conversation

    def go_on(self, conversation: Conversation, answered: Callable[[], Conversation]) -> None:
        """Note the conversation that the strand is of. `answered` adds the newest answer to it, and is called
        when somebody asks: few chats go on."""
        self.departures, self._answered = conversation.departures, answered

    @property
    def routed(self) -> list[np.ndarray]:
        pieces = (generation.routed_experts for _, _, generation in self.sampled)
        return [piece for piece in pieces if piece is not None]

    def begins(self, prompt: "array[int]", images: Sequence[PlacedImage]) -> bool:
        """Tell whether a context with these images continues the tokens so far."""
        shared = tuple(image for image in images if image.start < len(self.tokens))
        return prompt[: len(self.tokens)] == self.tokens and shared == self.images

    def extend(
        self, prompt: "array[int]", generation: Generation, call: Call, images: tuple[PlacedImage, ...] = ()
    ) -> None:
        """Append what `prompt` adds to the tokens so far, and a completion. `images` are all of `prompt`."""
        refuse_unequal_lengths(generation)
        self.images = images
        self.tokens.extend(prompt[len(self.tokens) :])
        self.sampled.append((len(self.tokens), call, generation))
        self.tokens.extend(generation.token_ids.tolist())

    def trajectory(
        self, reward: float, *,
        turn_rewards: Mapping[int, float], reward_components: Mapping[str, float], end: End | None,
        untrained: Set[int] = frozenset(),
    ) -> AgentTrajectory:  # fmt: skip
        """Return the recording as arrays. `turn_rewards` are by the number of the call; `untrained` are
        numbers of calls out of the loss."""
        length = len(self.tokens)
        mask, logprobs = np.zeros(length, np.bool_), np.zeros(length, np.float32)
        versions = np.full(length, -1, np.int32)
        turns = []
        for start, call, generation in self.sampled:
            span = slice(start, start + len(generation.token_ids))
            mask[span] = call.is_trained and call.number not in untrained
            logprobs[span] = generation.logprobs
            versions[span] = generation.policy_versions
            turns.append(_turn(span, call, generation, turn_rewards.get(call.number)))
        return AgentTrajectory(
            token_ids=np.array(self.tokens, np.int32),
            loss_mask=mask,
            behaviour_logprobs=logprobs,
            policy_versions=versions,
            turns=tuple(turns),
            reward=reward,
            reward_components=reward_components,
            end=end or ENDS[turns[-1].finish_reason],
            strand=self.number,
            agent=self.agent,
            policy=self.policy,
            fork=self.fork,
            trainable=bool(mask.any()),
            metadata=dict(self.departures),
            routed_experts=self._experts(),
            kept=self._kept(),
            kv_versions=self._kv_versions(versions),
            images=self.images,
        )

    def _kept(self) -> KeptSets | None:
        """Return the kept sets of all tokens, or None where no engine told any."""
        if all(generation.kept is None for _, _, generation in self.sampled):
            return None
        parts, end = [], 0
        for start, _, generation in self.sampled:
            parts += [KeptSets.none(start - end), generation.kept or KeptSets.none(len(generation.token_ids))]
            end = start + len(generation.token_ids)
        return KeptSets.joined(parts)

    def _kv_versions(self, policy_versions: np.ndarray) -> np.ndarray | None:
        """Return the oldest versions of keys and values of all tokens; None where no engine kept older ones.
        `policy_versions` are those of all tokens."""
        if all(generation.kv_versions is None for _, _, generation in self.sampled):
            return None
        found = policy_versions.copy()
        for start, _, generation in self.sampled:
            if generation.kv_versions is not None:
                found[start : start + len(generation.token_ids)] = generation.kv_versions
        return None if (found == policy_versions).all() else found

    def _experts(self) -> np.ndarray | None:
        """Return the experts of all tokens but the last, or None if an engine ended without them."""
        pieces = self.routed
        complete = sum(map(len, pieces)) == len(self.tokens) - 1
        return np.concatenate(pieces) if pieces and complete else None


def refuse_unequal_lengths(generation: Generation) -> None:
    """Raise `EngineError` unless each token of a completion has a log-prob and a policy version of its own.
    NumPy would give one value to all tokens in silence."""
    tokens = np.shape(generation.token_ids)
    values = {"log-probs": generation.logprobs, "policy versions": generation.policy_versions}
    if generation.kv_versions is not None:
        values["versions of keys and values"] = generation.kv_versions
    if len(tokens) != 1 or any(np.shape(each) != tokens for each in values.values()):
        found = ", ".join(f"{name} of shape {list(np.shape(each))}" for name, each in values.items())
        raise EngineError(
            f"the engine gave token ids of shape {list(tokens)}, {found}: each token is to have one of each"
        )


def _turn(span: slice, call: Call, generation: Generation, reward: float | None) -> Turn:
    return Turn(
        start=span.start,
        stop=span.stop,
        finish_reason=generation.finish_reason,
        temperature=call.sampling.temperature,
        top_p=call.sampling.top_p,
        top_k=call.sampling.top_k,
        reward=reward,
        min_p=call.sampling.min_p,
    )


def forked_from(
    token_ids: "array[int]", strands: Sequence[Strand], images: Sequence[PlacedImage] = ()
) -> Fork | None:
    """Return where a context departs from one of `strands`: from the one that it shares most tokens with. A
    strand counts whose first prompt is shared at least; None where none is."""
    forks = [
        Fork(strand.number, min(_shared(token_ids, strand.tokens), _other_image(images, strand.images)))
        for strand in strands
    ]
    begun = {strand.number: strand.sampled[0][0] for strand in strands}
    shared = [fork for fork in forks if fork.token >= begun[fork.strand]]
    return max(shared, key=lambda fork: fork.token, default=None)


def _other_image(one: Sequence[PlacedImage], other: Sequence[PlacedImage]) -> int:
    """Return the first token of an image that both do not share; a large number where there is none."""
    differing = (a.start for a, b in zip(one, other, strict=False) if a != b)
    return next(differing, sys.maxsize)


def _shared(one: "array[int]", other: "array[int]") -> int:
    length = min(len(one), len(other))
    differing = np.flatnonzero(np.asarray(one)[:length] != np.asarray(other)[:length])
    return int(differing[0]) if len(differing) else length
