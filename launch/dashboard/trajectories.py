"""What the page shows of trajectories: a list that is filtered, and one with the text of each token."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bus.codec import Json
from bus.errors import ConfigError, SchemaError
from bus.messages import parse_trajectory_name
from bus.trajectory import Trajectory
from launch.dashboard.token_texts import Decode, token_texts
from launch.dashboard.trajectory_sources import Groups, TrajectorySource
from launch.run_view.trajectory_spans import spans
from learner.metrics.trained_logprobs import TrainedLogprobs

AT_ONCE = 4
"""Groups that are read at a time."""
SEARCHED = 256
"""Most groups that one question searches; the next one goes on behind them."""
LONGEST_SEARCH_S = 3.0
"""Seconds after which a question is answered with what was found so far."""
PAGE = 40
"""Trajectories after which a page of the list ends, with its last group."""
PREVIEW_TOKENS = 60
DIGITS = 4
CUT_OFF = 20.0
"""Log ratios are cut off at this many nats: JSON has no infinity."""


@dataclass(frozen=True)
class TrajectoryFilter:
    """Which trajectories to list; None wants any."""

    step: int | None = None
    version: int | None = None
    """Version that sampled some token of the trajectory."""
    least_reward: float | None = None
    most_reward: float | None = None
    end: str | None = None
    recorded: bool = False
    """Whether only those are wanted whose importance ratios are known."""
    text: str | None = None
    """Text that the trajectory has somewhere, in capitals or not."""
    below: int | None = None
    """Lease below which to search, for the next page."""

    def matches(self, t: Trajectory) -> bool:
        """Return whether the trajectory is wanted; its step and its text are not looked at."""
        if self.version is not None and self.version not in t.policy_versions:
            return False
        if self.end is not None and t.end != self.end:
            return False
        if self.least_reward is not None and t.reward < self.least_reward:
            return False
        return self.most_reward is None or t.reward <= self.most_reward


async def trajectory_list(source: TrajectorySource, wanted: TrajectoryFilter) -> dict[str, Json]:
    """Return the newest wanted trajectories, and where the search goes on: `below`, null at its end."""
    of_step = None if wanted.step is None else await source.of_step(wanted.step)
    recorded = await source.recorded() if wanted.recorded else None
    async with source.groups() as groups:
        complete = await groups.leases()
        leases = complete if of_step is None else [*set(complete).intersection(of_step)]
        if recorded is not None:
            leases = [*set(leases).intersection(parse_trajectory_name(name)[0] for name in recorded)]
        leases = sorted((n for n in leases if wanted.below is None or n < wanted.below), reverse=True)
        decode = await source.decode()
        found, searched = await _search(groups, leases, wanted, decode, recorded)
    listed = await asyncio.to_thread(_summaries, found, decode)
    more = leases[searched - 1] if searched and searched < len(leases) else None
    return {"trajectories": listed, "below": more, "searched": searched, "complete": len(complete)}


async def _search(
    groups: Groups, leases: Sequence[int], wanted: TrajectoryFilter, decode: Decode, recorded: set[str] | None
) -> tuple[list[Trajectory], int]:
    """Return wanted trajectories of these leases, in their order, and how many leases were searched.

    It ends when a page is full, or when it was long enough: the reader decides whether it goes on."""
    until_s = time.monotonic() + LONGEST_SEARCH_S
    found: list[Trajectory] = []
    searched = 0
    while searched < min(len(leases), SEARCHED) and len(found) < PAGE:
        if searched and time.monotonic() > until_s:
            break
        part = leases[searched : searched + AT_ONCE]
        searched += len(part)
        for group in await groups.read(part):
            matching = [*filter(wanted.matches, group)]
            if recorded is not None:
                matching = [t for t in matching if t.trajectory_id in recorded]
            if wanted.text is not None:
                matching = await asyncio.to_thread(_with_text, matching, wanted.text.casefold(), decode)
            found += matching
    return found, searched


def _with_text(trajectories: Sequence[Trajectory], text: str, decode: Decode) -> list[Trajectory]:
    """Return those whose prompts, answers or text between them have `text`, which is casefolded."""
    return [t for t in trajectories if text in decode(t.token_ids.tolist()).casefold()]


def _summaries(trajectories: Iterable[Trajectory], decode: Decode) -> list[Json]:
    return [_summary(t, decode) for t in trajectories]


def _summary(t: Trajectory, decode: Decode) -> Json:
    versions = t.policy_versions[t.policy_versions >= 0]
    last = t.turns[-1] if t.turns else None
    ids = (
        [] if last is None else t.token_ids[last.start : min(last.stop, last.start + PREVIEW_TOKENS)].tolist()
    )
    return {
        "id": t.trajectory_id,
        "lease": t.lease_id,
        "rollout": t.rollout,
        "agent": t.agent,
        "policy": t.policy,
        "actor": t.actor,
        "reward": None if t.reward_due else t.reward,
        "end": t.end,
        "trained": t.is_trained,
        "tokens": len(t.token_ids),
        "turns": len(t.turns),
        "versions": [int(versions.min()), int(versions.max())] if len(versions) else None,
        "parent": None if t.parent is None else {"id": t.parent.trajectory_id, "token": t.parent.token},
        "preview": decode(ids),
    }


async def one_trajectory(source: TrajectorySource, name: str) -> dict[str, Json]:
    """Return a trajectory with its tokens, and its siblings. Raises `ConfigError` if it is not there."""
    try:
        lease = parse_trajectory_name(name)[0]
    except SchemaError as error:
        raise ConfigError(f"{name} names no trajectory: write it as g00000012.3") from error
    async with source.groups() as groups:
        group = [t for found in await groups.read([lease]) for t in found]
    found = next((t for t in group if t.trajectory_id == name), None)
    if found is None:
        raise ConfigError(f"{name} is not among the complete groups: it is due, retired or was never there")
    decode = await source.decode()
    steps = await source.steps(lease)
    trained = await source.logprobs(name)
    # a long one takes a while to decode
    return await asyncio.to_thread(_shown, found, group, steps, trained, decode)


def _shown(
    found: Trajectory, group: Iterable[Trajectory], steps: Iterable[int] | None,
    trained: TrainedLogprobs | None, decode: Decode,
) -> dict[str, Json]:  # fmt: skip
    ratios = None if trained is None else importance_ratios(found, trained)
    known = trained if ratios is not None else None
    return {
        "learner": None if known is None else {"step": known.step, "version": known.policy_version},
        "trajectory": _summary(found, decode),
        "components": dict(found.reward_components),
        "reward_source": found.reward_source,
        "metadata": dict(found.metadata),
        "steps": None if steps is None else [*steps],
        "group": _summaries(group, decode),
        "parts": [_part(found, ratios, decode, *span) for span in spans(found)],
    }


def importance_ratios(t: Trajectory, trained: TrainedLogprobs) -> list[float | None] | None:
    """Return the learner's policy over the one that sampled, for each token; None for one not trained.

    It returns None for log-probs of another number of tokens: they are of a trajectory that had this name in
    a run before."""
    mask = t.loss_mask.copy()
    mask[:1] = False  # nothing predicts the first token
    if int(np.count_nonzero(mask)) != len(trained.logprobs):
        return None
    log_ratios = trained.logprobs.astype(np.float64) - t.behaviour_logprobs[mask]
    ratios: list[float | None] = [None] * len(mask)
    for place, ratio in zip(np.flatnonzero(mask), np.exp(log_ratios.clip(-CUT_OFF, CUT_OFF)), strict=True):
        ratios[place] = float(ratio)
    return ratios


def _part(
    t: Trajectory, ratios: Sequence[float | None] | None, decode: Decode, start: int, stop: int,
    number: int | None,
) -> Json:  # fmt: skip
    """Return a turn with its tokens, or the text between two turns, whose tokens nobody sampled."""
    texts = token_texts(t.token_ids[start:stop].tolist(), decode)
    if number is None:
        return {"turn": None, "start": start, "stop": stop, "text": "".join(texts)}
    turn = t.turns[number]
    return {
        "turn": number + 1,
        "start": start,
        "stop": stop,
        "finish_reason": turn.finish_reason,
        "temperature": turn.temperature,
        "reward": turn.reward,
        "texts": [*texts],
        "logprobs": _rounded(t.behaviour_logprobs[start:stop].tolist()),
        "ratios": None if ratios is None else _rounded(ratios[start:stop]),
        "versions": [*t.policy_versions[start:stop].tolist()],
        "mask": [*t.loss_mask[start:stop].astype(int).tolist()],
    }


def _rounded(values: Sequence[float | None]) -> list[Json]:
    return [None if value is None else round(value, DIGITS) for value in values]
