"""Scores answers: with one reward, or with the one that each prompt chooses."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from numbers import Real
from typing import Self, TypeVar, cast

from actors.episodes.errors import LatestUses, is_of_host
from actors.episodes.task import Answer
from actors.rewards.answer_faults import Failure, judged
from actors.rewards.base import (
    LATER,
    AnswerFaultError,
    Closable,
    GroupReward,
    InvalidRewardError,
    Late,
    Reward,
    RewardError,
    Scored,
    UnscoredError,
)
from actors.rewards.builtin.registry import CONFIGURED, REWARDS, load_group_reward, load_reward
from actors.rewards.scoring.bounded_calls import BoundedCalls, CallHangsError
from actors.rewards.scoring.call_times import CallTimes
from actors.settings.rewards import SAMPLE_TEXT, RewardConfig
from bus.errors import nearest
from bus.trajectory import LARGEST_REWARD

Found = TypeVar("Found")
CHOICE = "reward"
"""Field of a prompt's metadata that names the reward of its answers."""
EXPECTED = "a reward is a finite number that float32 holds, a dict of such numbers by name, Scored, or LATER"


class Scorer:
    """Scores answers with one reward, each call within a time. Built-in rewards are known to be quick."""

    def __init__(
        self, name: str, *,
        timeout_s: float | None, threads: int = 16, reward: Reward | None = None,
        weights: Mapping[str, float] | None = None, lowest: float | None = None,
    ) -> None:  # fmt: skip
        """Call a reward; `lowest` is that of answers on which alone it fails, which have none otherwise."""
        self._lowest = lowest
        self._scores = LatestUses()
        self._newest: Answer | None = None
        """Newest answer that was scored, and that is not the label word by word."""
        self._name = name
        self._timeout_s = timeout_s
        self._weights = weights or {}
        self._reward = reward or load_reward(name)
        inline = name in REWARDS and reward is None
        self._may_change = not inline
        """Whether the reward may change what it is given, as a user's own may."""
        self._calls = BoundedCalls(name, self._reward, timeout_s=timeout_s, threads=threads, inline=inline)

    @classmethod
    def from_config(cls, name: str, config: RewardConfig) -> Self:
        """Build the scorer of one of the run's rewards; raises ConfigError for one that cannot be loaded."""
        return cls(
            name,
            timeout_s=None
            if name in CONFIGURED
            else config.reward_timeout_s,  # configured rewards have limits of their own
            threads=config.reward_threads,
            reward=load_reward(name, config) if name not in REWARDS else None,
            weights=config.reward_weights,
            lowest=config.lowest,
        )

    @property
    def times(self) -> tuple[CallTimes, ...]:
        return (self._calls.times,)

    async def score(self, answer: Answer) -> float | Late:
        """Return the finite reward of an answer, or `LATER`; raises RewardError."""
        found = await self.scored(answer)
        return found.reward if isinstance(found, Scored) else found

    async def scored(self, answer: Answer) -> Scored | Late:
        """Return the reward of an answer with its parts, or `LATER`; raises RewardError. An answer on which
        the reward fails twice, and not on the label and the newest other answer, has the lowest one. A reward
        that raises a RewardError itself says who is to blame."""
        newest = [] if self._newest is None else [self._newest]
        others = chain(map(control_of, [answer]), newest)  # made where the reward fails
        found: Scored | Late | RewardError | Failure
        if self._lowest is None:
            found = await self.tried(answer)
        else:  # a second try, since the server may have been away at the first
            found = await judged(self.tried, answer, controls=others)
        if isinstance(found, RewardError):
            raise found
        if isinstance(found, Failure):
            lowest = self._scores.lowest(self._lowest)
            if lowest is None or not _is_to_blame(found, self._newest):
                raise found.error
            return Scored(lowest, fault=f"{found.error}; it works on another answer")
        if isinstance(found, Scored) and not found.fault:
            self._scores.note(worked=True, reward=found.reward)
            if answer.text != answer.label:
                self._newest = answer
        return found

    async def tried(self, answer: Answer) -> Scored | Late | RewardError:
        """Return the reward, or how the function failed; raises as `_or_failure` does."""
        outcome = await self._calls.call(answer.copied() if self._may_change else answer)
        where = f"reward {self._name} on task {answer.task_id}"
        return _or_failure(
            outcome, lambda: checked(outcome, where, weights=self._weights, timeout_s=self._timeout_s)
        )

    async def close(self) -> None:
        if isinstance(self._reward, Closable):
            await self._reward.close()


def control_of(answer: Answer) -> Answer:
    """Return what a reward that works scores for the same task: its label, or a text without one."""
    return replace(answer, text=SAMPLE_TEXT if answer.label is None else answer.label, finish_reason="stop")


def _or_failure(outcome: object, check: Callable[[], Found]) -> Found | RewardError:
    """Return what `check` finds in the outcome of a call, or how the function failed. Raises a `RewardError`
    that it raised itself, unless an answer may be to blame for that."""
    try:
        return check()
    except RewardError as error:
        if error is outcome and not isinstance(error, UnscoredError):
            raise
        return error


def _is_to_blame(failure: Failure, newest: object) -> bool:
    """Tell whether an answer is to blame for a failure. The controls may be scored without a server that
    others need: while nothing else was scored, and `newest` is None, nothing says that one is there."""
    cause = failure.error.__cause__
    # that of a call which hangs is no sign of the host
    of_host = is_of_host(cause) and not isinstance(cause, CallHangsError)
    return failure.broken is None and not (newest is None and of_host)


class RewardChoice:
    """Scores each answer with the reward that its prompt chooses, or else with the first one."""

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = scorers
        self._default = next(iter(scorers))

    @classmethod
    def from_config(cls, config: RewardConfig) -> Self:
        """Build every reward that the run allows; raises ConfigError for one that cannot be loaded."""
        return cls({name: Scorer.from_config(name, config) for name in config.names})

    @property
    def times(self) -> tuple[CallTimes, ...]:
        return tuple(times for scorer in self._scorers.values() for times in scorer.times)

    async def scored(self, answer: Answer) -> Scored | Late:
        """Return the reward of an answer with its parts, or `LATER`; raises RewardError."""
        chosen = answer.metadata.get(CHOICE, self._default)
        if problem := refused_choice(chosen, tuple(self._scorers)):
            raise InvalidRewardError(f"task {answer.task_id}: {problem}")
        return await self._scorers[str(chosen)].scored(answer)

    async def close(self) -> None:
        for scorer in self._scorers.values():
            await scorer.close()


def refused_choice(chosen: object, allowed: Sequence[str]) -> str | None:
    """Return why a prompt cannot choose this reward, and the remedy; None if it can."""
    if chosen in allowed:
        return None
    return (
        f"its metadata choose the reward {chosen!r}: {nearest(chosen, allowed)}the run allows "
        f"{', '.join(allowed)}; name others in actors.environment.rewards"
    )


class GroupScorer:
    """Gives the answers of a group their final rewards."""

    def __init__(
        self, name: str, *,
        timeout_s: float, threads: int = 16, weights: Mapping[str, float] | None = None,
        reward: GroupReward | None = None, lowest: float | None = None,
    ) -> None:  # fmt: skip
        """Call a group reward; `lowest` is that of answers that make it fail, which fail the group else."""
        self._lowest = lowest
        self._scores = LatestUses()
        self._newest: Sequence[Answer] | None = None
        """Newest group that was scored, without what is to blame for a failure."""
        self._name = name
        self._timeout_s = timeout_s
        self._weights = weights or {}
        function = reward or load_group_reward(name)
        self._calls = BoundedCalls(name, function, timeout_s=timeout_s, threads=threads)

    @classmethod
    def from_config(cls, config: RewardConfig) -> Self | None:
        """Build a scorer; None where the run has no group reward. Raises ConfigError if it cannot be."""
        if config.group_reward is None:
            return None
        return cls(
            config.group_reward,
            timeout_s=config.reward_timeout_s,
            threads=config.reward_threads,
            weights=config.reward_weights,
            lowest=config.lowest,
        )

    @property
    def times(self) -> tuple[CallTimes, ...]:
        return (self._calls.times,)

    async def scored(self, answers: Sequence[Answer]) -> list[Scored]:
        """Return the reward of each answer; raises RewardError, which concerns all of them.

        An answer with which the reward fails twice in a group of controls, and not on the controls alone nor
        on the newest group, has the lowest one; the others are scored with its control in its place. Where
        that holds for each answer of the group, another group must have been scored before."""
        found = await self._tried(answers)
        if isinstance(found, RewardError):
            lowest = self._scores.lowest(self._lowest)
            if lowest is None:
                raise found
            return await self._scored_by_fault(answers, found, lowest)
        self._scores.note(worked=True, reward=min(one.reward for one in found))
        self._newest = answers
        return found

    async def _scored_by_fault(
        self, answers: Sequence[Answer], error: RewardError, lowest: float
    ) -> list[Scored]:
        """Return what is left where the reward fails by `error`; raises it where no answer is to blame."""
        newest = self._newest
        faults = await self._faults(answers, error, newest)
        if len(faults) == len(answers) and newest is None:
            raise error
        rest = [control_of(one) if n in faults else one for n, one in enumerate(answers)]
        others = await self._tried(rest)
        if isinstance(others, RewardError):
            raise error
        self._scores.note(worked=len(faults) < len(answers))
        if len(faults) < len(answers):
            self._newest = rest
        return [
            Scored(lowest, fault=f"{faults[n]}; it works with another answer") if n in faults else others[n]
            for n in range(len(answers))
        ]

    async def _faults(
        self, answers: Sequence[Answer], error: RewardError, newest: Sequence[Answer] | None
    ) -> dict[int, Exception]:
        """Return how the reward fails by each answer that is to blame; raises `error` where none is, or where
        it fails on the controls, or on the newest group that it scored."""
        own = [control_of(one) for one in answers]
        controls = [own, *([] if newest is None else [newest])]
        for control in controls:  # once for all: what is away is not asked for each answer
            if isinstance(await self._tried(control), RewardError):
                raise error
        alone = [[*own[:n], one, *own[n + 1 :]] for n, one in enumerate(answers)]
        found = await asyncio.gather(*(judged(self._tried, one, controls=controls) for one in alone))
        failures = {n: one for n, one in enumerate(found) if isinstance(one, Failure)}
        if not failures or not all(_is_to_blame(one, newest) for one in failures.values()):
            raise error
        return {n: one.error for n, one in failures.items()}

    async def _tried(self, answers: Sequence[Answer]) -> list[Scored] | RewardError:
        """Return the rewards, or how the function failed; raises as `_or_failure` does."""
        outcome = await self._calls.call([answer.copied() for answer in answers])
        return _or_failure(outcome, lambda: self._checked(answers, outcome))

    def _checked(self, answers: Sequence[Answer], outcome: object) -> list[Scored]:
        where = f"group reward {self._name} on {len(answers)} answers, the first {answers[0].task_id},"
        if isinstance(outcome, Exception):
            checked(outcome, where, weights={}, timeout_s=self._timeout_s)  # raises
        if callable(to_list := getattr(outcome, "tolist", None)):  # an array, a tensor
            outcome = to_list()
        if not isinstance(outcome, list | tuple) or len(outcome) != len(answers):
            raise InvalidRewardError(f"{where} returned {outcome!r}: return a list with a reward for each")
        found = [checked(one, where, weights=self._weights, timeout_s=self._timeout_s) for one in outcome]
        if any(one is LATER for one in found):
            raise RewardError(f"{where} returned LATER: a group's rewards have to be known together")
        return [one for one in found if isinstance(one, Scored)]


def checked(
    outcome: object, where: str, *, weights: Mapping[str, float], timeout_s: float | None
) -> Scored | Late:
    """Return the reward that a call gave, also by an `AnswerFaultError`. Raises `RewardError` for another
    exception, `InvalidRewardError` for what is no reward.

    Args:
        outcome: what the function returned, or the exception that it raised.
        where: names the reward and the answer in errors.
        weights: of the parts by name; empty where they are summed.
        timeout_s: limit of the call, for the error that says it passed.
    """
    if isinstance(outcome, AnswerFaultError):
        return Scored(_number(outcome.reward, where), fault=str(outcome))
    if isinstance(outcome, RewardError):
        raise outcome
    if isinstance(outcome, CallHangsError):
        raise RewardError(f"{where}: no result within {timeout_s} s") from outcome
    if isinstance(outcome, Exception):
        raise RewardError(f"{where} raised {outcome!r}") from outcome
    if outcome is LATER:
        return LATER
    if isinstance(outcome, Scored):
        components = _parts(outcome.components, where) if outcome.components else {}
        reward = _weighed(components, weights, where) if weights and components else outcome.reward
        return Scored(_number(reward, where), components)
    if isinstance(outcome, Mapping):
        components = _parts(outcome, where)
        return Scored(_number(_weighed(components, weights, where), where), components)
    return Scored(_number(outcome, where))


def _parts(parts: Mapping[str, object], where: str) -> dict[str, float]:
    if not isinstance(parts, Mapping) or not parts or not all(isinstance(n, str) and n for n in parts):
        raise InvalidRewardError(f"{where} returned {parts!r}: {EXPECTED}")
    return {name: _number(value, f"{where}, in its part {name!r},") for name, value in parts.items()}


def _weighed(parts: Mapping[str, float], weights: Mapping[str, float], where: str) -> float:
    """Return the weighted sum of the parts; without weights, their sum."""
    if not weights:
        return sum(parts.values())
    if missing := sorted(weights.keys() - parts.keys()):
        raise InvalidRewardError(
            f"{where} returned no part {missing[0]!r}, which reward_weights names: it has {sorted(parts)}"
        )
    return sum(weight * parts[name] for name, weight in weights.items())


def _number(value: object, where: str) -> float:
    value = _without_dimensions(value)
    if not isinstance(value, Real) or not abs(cast(float, value)) <= LARGEST_REWARD:
        raise InvalidRewardError(f"{where} returned {value!r}: {EXPECTED}")
    return float(value)


def _without_dimensions(value: object) -> object:
    """Return the number in a tensor or array of no dimensions, and anything else as it is."""
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        return cast(object, item())
    return value
