"""The turns of rollouts while they run: sampled here, or left by an actor that had begun the rollout.

A rollout that is begun again asks the same as before, as long as its environment does the same: then its
turns come from here, with the log-probs and versions that they were sampled with. Whatever else it asks is
sampled.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from xxhash import xxh3_128

from actors.engines.base import NOTHING, Engine, Generation, GenerationRequest
from actors.policy.strand import Call
from bus.errors import HandBackError
from bus.policy_names import DEFAULT_POLICY
from bus.waiting import set_within

INTERRUPT_S = 10.0
"""Longest time that engines have to hand out the tokens of interrupted completions."""
CANCELLED_WITHIN_S = 60.0
"""Longest time that an interrupted rollout waits to be cancelled."""


@dataclass(frozen=True, slots=True, eq=False)
class SampledTurn:
    """One completion of a rollout."""

    number: int
    """Counts the completions of the rollout from 0."""
    context: bytes
    generation: Generation
    """What was sampled; the finish reason is `abort` where it was cut short."""
    trained: bool

    @property
    def key(self) -> tuple[int, bytes, int]:
        """Return what tells the turn from others of its rollout, and from its own beginning."""
        return self.number, self.context, len(self.generation.token_ids)

    def is_of_use(self, since: int) -> bool:
        """Return whether the turn has tokens, none of which is of the policy's versions before `since`."""
        versions = self.generation.policy_versions
        return bool(len(versions)) and not (self.trained and int(versions.min()) < since)


def context_of(call: Call, request: GenerationRequest) -> bytes:
    """Return a digest of what a completion depends on, besides the weights and the seed."""
    asked = call.agent, call.policy, replace(request.sampling, seed=None), request.experts_from
    digest = xxh3_128(repr(asked).encode())
    for image in request.images:
        digest.update(f"{image.digest} at {image.start}".encode())
    digest.update(np.asarray(request.token_ids, np.int32).data)
    return digest.digest()


class RolloutTurns:
    """The turns of one attempt at a rollout."""

    def __init__(self, left: Iterable[SampledTurn], counts: Counter[str]) -> None:
        """`left` are turns that another actor left, and `counts` counts those that are used."""
        self._left: dict[bytes, deque[SampledTurn]] = {}
        for turn in left:
            self._left.setdefault(turn.context, deque()).append(turn)
        self._stored = {turn.key for turns in self._left.values() for turn in turns}
        self._sampled: dict[int, SampledTurn] = {}
        self._counts = counts
        self._asked: dict[str, Engine] = {}
        self._calls = 0
        """Calls of the policy that wait for their completions."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_interrupted = False

    def unstored(self, *, since: int) -> list[SampledTurn]:
        """Return the turns that no shard has, without those of no tokens or of versions before `since`."""
        turns = sorted(self._sampled.values(), key=lambda turn: turn.number)
        return [turn for turn in turns if turn.key not in self._stored and turn.is_of_use(since)]

    @property
    def number_stored(self) -> int:
        return len({number for number, _, _ in self._stored})

    def stored(self, turns: Iterable[SampledTurn]) -> None:
        self._stored.update(turn.key for turn in turns)

    def take(self, context: bytes, request: GenerationRequest) -> Generation | None:
        """Return what was sampled for such a request before, whole or in part; each turn is used once."""
        turns = self._left.get(context)
        if not turns:
            return None
        found = turns.popleft().generation
        self._counts["reused_turns"] += 1
        self._counts["reused_tokens"] += len(found.token_ids)
        return _with_end(found, request)

    def note(self, turn: SampledTurn) -> None:
        self._sampled[turn.number] = turn

    async def ask(self, engine: Engine, request: GenerationRequest) -> Generation:
        """Have the engine continue `request`; `interrupt` cuts it short. Raises as `Engine.generate`."""
        if self._is_interrupted:
            return NOTHING
        self._asked[request.request_id] = engine
        try:
            return await engine.generate(request)
        finally:
            del self._asked[request.request_id]

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Have `interrupt` wait for what is inside: until the turn is noted."""
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def interrupt(self) -> None:
        """Cut completions short, and return when their tokens are noted; whoever asks further waits."""
        self._is_interrupted = True
        async with asyncio.TaskGroup() as tasks:
            for request_id, engine in self._asked.items():
                tasks.create_task(engine.abort(request_id))
        await set_within(self._idle, INTERRUPT_S)

    async def wait_if_interrupted(self) -> None:
        """Return at once, unless the rollout was interrupted: then wait to be cancelled."""
        if self._is_interrupted:
            await asyncio.sleep(CANCELLED_WITHIN_S)
            raise HandBackError("the rollout was interrupted: another actor goes on with it")


def _with_end(found: Generation, request: GenerationRequest) -> Generation:
    """Return a generation with its finish reason, also where it was cut short after its last token."""
    sampling, tokens = request.sampling, found.token_ids
    if found.finish_reason != "abort":
        return found
    if len(tokens) and int(tokens[-1]) in sampling.stop_token_ids:
        return replace(found, finish_reason="stop")
    return replace(found, finish_reason="length") if len(tokens) >= sampling.max_new_tokens else found


class TurnsByRollout:
    """The turns of all rollouts that an actor has under way, by the rollouts' names."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Turns and tokens that were not sampled again."""
        self._rollouts: dict[str, RolloutTurns] = {}

    def begin(self, rollout: str, left: Sequence[SampledTurn] = ()) -> None:
        """Record a rollout from now on, in place of an earlier attempt at it."""
        self._rollouts[rollout] = RolloutTurns(left, self.counts)

    def of(self, rollout: str) -> RolloutTurns | None:
        """Return the turns of a rollout, unless it is not recorded, as that of a held-out prompt."""
        return self._rollouts.get(rollout)

    def end(self, rollouts: Iterable[str]) -> None:
        for rollout in rollouts:
            self._rollouts.pop(rollout, None)


def trained_turn(call: Call) -> bool:
    """Return whether a call's tokens enter the loss of the run's own policy."""
    return call.is_trained and call.policy == DEFAULT_POLICY
