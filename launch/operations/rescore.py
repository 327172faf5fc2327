"""`launch rescore`: scores trajectories of a run by another reward, without a bus."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actors.environments.choice import DEFAULT, chosen_environment
from actors.rewards.scoring.scorers import GroupScorer, RewardChoice, Scorer
from actors.settings.actors import ActorsConfig, EnvironmentConfig
from actors.settings.agents import POSTED
from actors.settings.rewards import RewardConfig
from bus.codec import Json
from bus.errors import ConfigError
from bus.messages import Prompt
from bus.policy_names import DEFAULT_POLICY
from bus.process.work_progress import long_work
from bus.trajectory import Trajectory
from launch.model_files.model_directory import model_of_run
from launch.run_view.run_files import recorded_config
from launch.trajectories.stored_groups import open_stores
from storage.client.score_tables import Comparison, compare, save_scores, scores_path
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger_reader import facts_of, leases_of_steps
from storage.prompts.data_sets import PastPrompts
from storage.store.replay import ReplayStore, read_groups

if TYPE_CHECKING:
    from actors.policy.chat_format import ChatFormat
    from actors.rewards.scoring.rescoring import Rescored

AT_ONCE = 64
"""Number of groups in memory at a time."""
OWN_REWARDS = "own-rewards"
"""What the table is named after where no reward is: those of the environments."""
SHOWN_FAILURES = 5


@dataclass(frozen=True)
class Interval:
    """Groups to score: those of optimizer steps, or those of leases, whether trained on or not."""

    from_step: int | None = None
    to_step: int | None = None
    leases: range | None = None


@dataclass(frozen=True)
class Rescoring:
    """The table that was made, and how its rewards compare with those that were trained with."""

    run: str
    reward: str
    table: str
    groups: int
    groups_not_complete: int
    """Number of leases in the interval whose groups are not complete in the store."""
    trajectories: int
    failed: int
    """Number of trajectories for which the reward failed."""
    failures: tuple[str, ...]
    comparison: Comparison

    def to_json(self) -> dict[str, Json]:
        values: dict[str, Json] = asdict(self)
        del values["comparison"]
        return {**values, **asdict(self.comparison)}

    def __str__(self) -> str:
        to = self.comparison
        correlation = "not defined" if to.rank_correlation is None else f"{to.rank_correlation:.3f}"
        rows = (f"  was {r.old}: {r.trajectories}, now {r.mean_new:.4g} on average" for r in to.by_old)
        lines = [
            f"{self.trajectories} trajectories of {self.groups} groups scored by {self.reward}: "
            f"mean {to.mean_old:.4g} -> {to.mean_new:.4g}",
            f"changed {to.changed_fraction:.1%}, rank correlation {correlation}",
            *rows,
            *(f"without a score: {failure}" for failure in self.failures),
            f"table: {self.table}",
        ]
        return "\n".join(lines)


def parse_leases(text: str) -> range:
    """Parse `A-B`, both included. Raises `ConfigError` for other text."""
    first, dash, last = text.partition("-")
    if not (dash and first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise ConfigError(f"--leases {text!r}: write the first and the last, like 0-255")
    return range(int(first), int(last) + 1)


async def run_rescore(
    directory: Path, run_name: str, reward: str | None, interval: Interval, stop: asyncio.Event, *,
    name: str | None = None, model: Path | None = None,
) -> Rescoring:  # fmt: skip
    """Score the interval with `reward`, write the table, return what it says. `stop` leaves no table.

    Each group is scored with the settings of the environment that made it; without `reward` also with that
    environment's own rewards.

    Raises `ConfigError` for a run, an interval or a reward that is not there, `StorageError` for groups that
    were retired."""
    run = RunDirectory(directory, run_name)
    config = recorded_config(run)
    if config.trains != DEFAULT_POLICY:
        raise ConfigError(
            f"run {run_name!r} is of policy {config.trains!r} of another run, whose prompts it does not "
            "have: its trajectories cannot be scored again"
        )
    path = scores_path(run.path, name or (reward or OWN_REWARDS).replace(":", "."))

    scoring = EnvironmentRewards(config.actors, reward)  # a wrong name shows before torch is loaded
    async with AsyncExitStack() as open_parts:
        open_parts.push_async_callback(scoring.close)
        stores = open_parts.enter_context(open_stores(run, config.replay.shards))
        leases, skipped = _leases(run, stores, interval)
        from actors.rewards.scoring.rescoring import Rescored

        chat = _chat(model or model_of_run(config, run))
        prompts = PastPrompts(facts_of(run.ledger), run.data)
        found = Rescored()
        advance = open_parts.enter_context(long_work(f"scoring groups of run {run_name}", len(leases)))
        for first in range(0, len(leases), AT_ONCE):
            groups = await asyncio.to_thread(read_groups, stores, leases[first : first + AT_ONCE])
            work = (scoring.rescore(group, prompts.of(group[0].lease_id), chat, found) for group in groups)
            await asyncio.gather(*work)
            advance(len(groups))
            if stop.is_set():
                raise ConfigError(
                    f"stopped after {first + len(groups)} of {len(leases)} groups: no table made"
                )
    if not found.scores:
        raise ConfigError(
            f"{reward or OWN_REWARDS} scored none of {len(found.failures)} trajectories: {found.failures[0]}"
        )
    scores = sorted(found.scores, key=lambda score: score.trajectory_id)
    await asyncio.to_thread(save_scores, path, scores)
    return Rescoring(
        run=run_name,
        reward=reward or OWN_REWARDS,
        table=str(path),
        groups=len(leases),
        groups_not_complete=skipped,
        trajectories=len(scores),
        failed=len(found.failures),
        failures=tuple(found.failures[:SHOWN_FAILURES]),
        comparison=compare(scores),
    )


def _leases(run: RunDirectory, stores: Sequence[ReplayStore], interval: Interval) -> tuple[list[int], int]:
    """Return the complete leases of the interval in order, and the number of others."""
    if interval.leases is not None:
        complete = {lease_id for store in stores for lease_id in store.completed}
        found = [lease_id for lease_id in interval.leases if lease_id in complete]
        if not found:
            raise ConfigError(
                f"none of the leases {interval.leases[0]} to {interval.leases[-1]} is complete in store; "
                f"{len(complete)} groups are, up to lease {max(complete, default='none')}"
            )
        return found, len(interval.leases) - len(found)
    steps = leases_of_steps(run.ledger)
    first, last = min(steps, default=0), max(steps, default=0)
    begin, end = interval.from_step or first, last if interval.to_step is None else interval.to_step
    trained = {lease_id for step, leases in steps.items() if begin <= step <= end for lease_id in leases}
    if not trained:
        there = f"steps {first} to {last}" if steps else "no step yet"
        raise ConfigError(f"run {run.name!r} has no groups of steps {begin} to {end}: it trained {there}")
    return sorted(trained), 0


def _chat(model: Path) -> "ChatFormat":
    from transformers import AutoTokenizer

    from actors.policy.chat_format import ChatFormat
    from storage.images.chat import ImageChat

    if not (model / "config.json").is_file():
        raise ConfigError(f"{model} is no model directory: name one with the run's tokenizer by --model")
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    return ChatFormat(tokenizer, images=ImageChat.of(model, tokenizer))


class EnvironmentRewards:
    """Scores each group by the settings of its environment, which its prompt names if there are several."""

    def __init__(self, actors: ActorsConfig, reward: str | None) -> None:
        """Build the scorers of all environments.

        Raises `ConfigError` for a reward that cannot be loaded, and without `reward` where the run's only
        environment computes none.

        Args:
            actors: of the run.
            reward: scores all groups; None leaves each to its environment's own rewards, its group reward
                among them.
        """
        self._several = bool(actors.environments)
        self._environments = actors.by_name
        self._scorers = {name: _scorer(config, reward) for name, config in actors.by_name.items()}
        self._group_scorers = {
            name: GroupScorer.from_config(config)
            for name, config in actors.by_name.items()
            if reward is None and isinstance(config, RewardConfig)
        }
        if not any(self._scorers.values()):
            raise ConfigError("no environment of the run computes a reward: name one by --reward")

    async def rescore(
        self, group: Sequence[Trajectory], prompt: Prompt, chat: "ChatFormat", into: "Rescored"
    ) -> None:
        """Score a group's answers to `prompt`, adding to `into`. Among several environments, one whose
        answers cannot be scored again costs its own groups alone. Raises `ConfigError` as
        `actors.rewards.rescoring.rescore` does in all other cases."""
        from actors.rewards.scoring.rescoring import rescore

        name = str(chosen_environment(prompt.metadata)) if self._several else DEFAULT
        scorer = self._scorers.get(name)
        if scorer is None:
            into.failures += [
                f"{one.trajectory_id}: the environment {name!r} computes no reward: name one by --reward"
                for one in group
            ]
            return
        try:
            await rescore(group, prompt, chat, scorer, into, group_scorer=self._group_scorers.get(name))
        except ConfigError as error:
            if not self._several or self._environments[name].scores_one_answer:
                raise
            into.failures += [f"{one.trajectory_id}, environment {name!r}: {error}" for one in group]

    async def close(self) -> None:
        for scorer in self._scorers.values():
            if scorer is not None:
                await scorer.close()


def _scorer(config: EnvironmentConfig, reward: str | None) -> Scorer | RewardChoice | None:
    """Return what scores answers of an environment; None where it computes no reward itself."""
    settings = config if isinstance(config, RewardConfig) else None
    if reward is not None:
        return Scorer.from_config(reward, settings or RewardConfig())
    return None if settings is None or settings.reward == POSTED else RewardChoice.from_config(settings)
