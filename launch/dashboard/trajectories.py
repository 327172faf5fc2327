"""What the page shows of trajectories: a list that is filtered, one with the text of each token, and a group
side by side."""

import asyncio
from collections.abc import Iterable, Sequence

from bus.codec import Json
from bus.errors import ConfigError, SchemaError
from bus.trajectory import Trajectory
from launch.trajectories.facts import ratios_of, spans
from launch.trajectories.held_out import group_of
from launch.trajectories.search import (
    TrajectoryFilter,
    answer_text,
    known_reward,
    newest,
    opened,
    prompt_text,
    sampled_versions,
)
from launch.trajectories.sources import TrajectorySource
from launch.trajectories.token_texts import Decode, token_texts
from launch.trajectories.training import GroupTraining

SEARCHED = 256
"""Most groups that one question searches; the next one goes on behind them."""
LONGEST_SEARCH_S = 3.0
"""Seconds after which a question is answered with what was found so far."""
PAGE = 40
"""Trajectories after which a page of the list ends, with its last group."""
PREVIEW_TOKENS = 60
DIGITS = 4


async def trajectory_list(source: TrajectorySource, wanted: TrajectoryFilter) -> dict[str, Json]:
    """Return the newest wanted trajectories, and where the search goes on: `below`, null at its end."""
    async with opened(source, wanted) as search:
        found = await newest(search, PAGE, groups=SEARCHED, seconds=LONGEST_SEARCH_S)
    listed = await asyncio.to_thread(_summaries, found.trajectories, search.decode)
    return {
        "trajectories": listed,
        "below": found.below,
        "searched": found.searched,
        "complete": search.complete,
        "left_out": search.left_out,
    }


def _summaries(trajectories: Iterable[Trajectory], decode: Decode) -> list[Json]:
    return [_summary(t, decode) for t in trajectories]


def _summary(t: Trajectory, decode: Decode) -> dict[str, Json]:
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
        "reward": known_reward(t),
        "end": t.end,
        "trained": t.is_trained,
        "tokens": len(t.token_ids),
        "masked": int(t.loss_mask.sum()),
        "turns": len(t.turns),
        "versions": sampled_versions(t),
        "parent": None if t.parent is None else {"id": t.parent.trajectory_id, "token": t.parent.token},
        "preview": decode(ids),
    }


async def one_trajectory(source: TrajectorySource, name: str, *, labelled: bool = True) -> dict[str, Json]:
    """Return a trajectory with its tokens, and its siblings. Raises `ConfigError` if it is not there. Without
    `labelled` the label of its task is left out."""
    try:
        lease, _ = group_of(name)
    except SchemaError as error:
        raise ConfigError(f"{name} names no trajectory: write it as g00000012.3") from error
    group = await _group(source, lease)
    found = next((t for t in group if t.trajectory_id == name), None)
    if found is None:
        raise ConfigError(f"{name} is not among the complete groups: it is due, retired or was never there")
    decode = await source.decode()
    training = (await source.training([lease]))[lease]
    # A long trajectory takes a while to decode.
    shown = await asyncio.to_thread(_shown, found, group, training, decode)
    return shown | {"label": training.label if labelled else None}


async def one_group(source: TrajectorySource, lease: int, *, labelled: bool = True) -> dict[str, Json]:
    """Return the answers of a group, to be shown side by side. Raises `ConfigError` if it is not there."""
    group = await _group(source, lease)
    if not group:
        raise ConfigError(f"the group of lease {lease} is not complete, was retired or was never there")
    decode = await source.decode()
    training = (await source.training([lease]))[lease]
    return {
        "lease": lease,
        "label": training.label if labelled else None,
        "prompt": await asyncio.to_thread(prompt_text, group[0], decode),
        "answers": await asyncio.to_thread(lambda: [_answer(t, training, decode) for t in group]),
    }


async def _group(source: TrajectorySource, lease: int) -> list[Trajectory]:
    async with source.groups() as groups:
        return [t for found in await groups.read([lease]) for t in found]


def _answer(t: Trajectory, training: GroupTraining, decode: Decode) -> Json:
    return {
        **_summary(t, decode),
        "components": dict(t.reward_components),
        "advantage": training.advantage(t),
        "training": training.told(t),
        "text": answer_text(t, decode),
    }


def _shown(
    found: Trajectory, group: Iterable[Trajectory], training: GroupTraining, decode: Decode
) -> dict[str, Json]:
    ratios = training.ratios(found)
    known = training.logprobs[found.trajectory_id] if ratios is not None else None
    return {
        "learner": None if known is None else {"step": known.step, "version": known.policy_version},
        "trajectory": _summary(found, decode),
        "components": dict(found.reward_components),
        "reward_source": found.reward_source,
        "metadata": dict(found.metadata),
        "advantage": training.advantage(found),
        "training": training.told(found),
        "ratios": ratios_of(training.importance_ratios(found)),
        "group": [_summary(t, decode) | {"advantage": training.advantage(t)} for t in group],
        "parts": [_part(found, ratios, decode, *span) for span in spans(found)],
    }


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
