"""Calls a reward so that it cannot block the event loop, hang a rollout or return something invalid."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from math import ceil
from numbers import Real
from typing import cast

from actors.rewards.base import LATER, Answer, InvalidRewardError, Late, Reward, RewardError
from actors.rewards.registry import REWARDS, load_reward
from bus.trajectory import LARGEST_REWARD
from bus.waiting import set_within

Outcome = object
"""Return value of a reward, or the exception that it raised."""


class Scorer:
    """Scores answers with one reward.

    Built-in rewards run inline, async ones on the event loop, and the user's plain functions in daemon
    threads, `threads` at a time, each of which scores its share of the answers that wait. The timeout applies
    to a single call. A thread that is stuck in a call is left behind, and a new thread scores the answers
    after it."""

    def __init__(
        self, name: str, *, timeout_s: float, threads: int = 16, reward: Reward | None = None
    ) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._reward = reward or load_reward(name)
        self._inline = name in REWARDS and reward is None
        self._async = _is_async(self._reward)
        self._pending: list[tuple[Answer, asyncio.Future[Outcome]]] = []
        self._threads = threads
        self._drains: set[asyncio.Task[None]] = set()

    async def score(self, answer: Answer) -> float | Late:
        """Return the finite reward of an answer, or `LATER`; raises RewardError."""
        if self._inline:
            outcome = _call(self._reward, answer)
        elif self._async:
            outcome = await self._await(answer)
        else:
            outcome = await self._in_thread(answer)
        return self._checked(outcome, answer)

    async def _await(self, answer: Answer) -> Outcome:
        reward = cast(Callable[[Answer], Awaitable[float | Late]], self._reward)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await reward(answer)
        except TimeoutError as error:
            return error
        # A user's reward may raise anything; `_checked` raises it again, as a `RewardError` with this cause.
        except Exception as error:  # noqa: BLE001
            return error

    async def _in_thread(self, answer: Answer) -> Outcome:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._pending.append((answer, future))
        if len(self._drains) < self._threads:
            drain = asyncio.create_task(self._drain_pending(), name=f"reward {self._name}")
            self._drains.add(drain)
            drain.add_done_callback(self._drains.discard)
        return await future

    async def _drain_pending(self) -> None:
        while self._pending:
            share = ceil(len(self._pending) / self._threads)
            batch, self._pending = self._pending[:share], self._pending[share:]
            outcomes = await _run_in_thread(self._reward, [answer for answer, _ in batch], self._timeout_s)
            for (_, future), outcome in zip(batch, outcomes, strict=False):
                if not future.done():
                    future.set_result(outcome)
            self._pending = batch[len(outcomes) :] + self._pending  # the answers after the one that hung

    def _checked(self, outcome: Outcome, answer: Answer) -> float | Late:
        where = f"reward {self._name} on task {answer.task_id}"
        if isinstance(outcome, RewardError):
            raise outcome
        if isinstance(outcome, TimeoutError):
            raise RewardError(f"{where}: no result within {self._timeout_s} s") from outcome
        if isinstance(outcome, Exception):
            raise RewardError(f"{where} raised {outcome!r}") from outcome
        if outcome is LATER:
            return LATER
        outcome = _without_dimensions(outcome)
        if not isinstance(outcome, Real) or not abs(cast(float, outcome)) <= LARGEST_REWARD:
            raise InvalidRewardError(
                f"{where} returned {outcome!r}: a reward is a finite number that float32 holds, or LATER"
            )
        return float(outcome)


async def _run_in_thread(reward: Reward, answers: Sequence[Answer], timeout_s: float) -> list[Outcome]:
    """Score answers in order in a new daemon thread.

    Returns their outcomes. If a call takes longer than `timeout_s`, the list ends there with TimeoutError."""
    loop, ended, outcomes = asyncio.get_running_loop(), asyncio.Event(), list[Outcome]()
    abandoned = threading.Event()

    def work() -> None:
        for answer in answers:
            outcomes.append(_call(reward, answer))
            if abandoned.is_set():
                return
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=work, name="reward", daemon=True).start()
    while True:
        before = len(outcomes)
        if await set_within(ended, timeout_s):
            return outcomes
        if len(outcomes) == before:  # still the same call as one timeout ago
            abandoned.set()
            return [*outcomes[:before], TimeoutError()]


def _call(reward: Reward, answer: Answer) -> Outcome:
    try:
        return reward(answer)
    # A user's reward may raise anything; `_checked` raises it again, as a `RewardError` with this cause.
    except Exception as error:  # noqa: BLE001
        return error


def _without_dimensions(outcome: Outcome) -> Outcome:
    """Return the number in a tensor or array of no dimensions, and anything else as it is."""
    if getattr(outcome, "shape", None) == () and callable(item := getattr(outcome, "item", None)):
        return cast(Outcome, item())
    return outcome


def _is_async(function: object) -> bool:
    called = getattr(function, "__call__", None)  # noqa: B004  # an object may be called asynchronously
    return any(inspect.iscoroutinefunction(f) for f in (function, called, getattr(function, "func", None)))
