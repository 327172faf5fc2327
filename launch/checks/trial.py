"""`launch try`: a model, its template, environment and reward on a few prompts, without training, as text."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from actors.engines.base import Sampling
from actors.engines.embedded.engine import EmbeddedEngine
from actors.environments.base import Environment, RunsOnDemand
from actors.environments.build import built_environment
from actors.episodes.episode import AgentTrajectory, Episode
from actors.episodes.task import Task
from actors.policy.chat_format import Tokenizer
from actors.policy.messages import Completion
from actors.policy.policy import Policy
from bus.codec import Json
from bus.errors import ConfigError
from launch.checks.start_checks import check_start, start_remarks
from launch.model_files.hub_revision import pinned
from launch.model_files.model_directory import model_directory
from launch.services.hidden_files import hidden_files
from launch.settings.run_config import RunConfig
from storage.chats.stop_tokens import stop_token_ids
from storage.disk.run_directory import RunDirectory
from storage.images.chat import ImageChat
from storage.metrics.records import integer

Say = Callable[[str], None]


class WatchedPolicy(Policy):
    """Notes the completions of one rollout as its environment gets them."""

    seen: list[Completion]

    def watched(self) -> Self:
        """Return a policy for one more rollout, which shares the engine."""
        policy = copy(self)
        policy.seen = []
        return policy

    async def chat(self, *args: Any, **asked: Any) -> Completion:
        """Do what `Policy.chat` does."""
        return self._noted(await super().chat(*args, **asked))

    async def generate(self, *args: Any, **asked: Any) -> Completion:
        """Do what `Policy.generate` does."""
        return self._noted(await super().generate(*args, **asked))

    async def go_on(self, *args: Any, **asked: Any) -> Completion:
        """Do what `Policy.go_on` does."""
        return self._noted(await super().go_on(*args, **asked))

    def _noted(self, completion: Completion) -> Completion:
        self.seen.append(completion)
        return completion


@dataclass(slots=True)
class Trial:
    """Shows rollouts as text, and counts what they have in common."""

    tokenizer: Tokenizer
    stops: Sequence[int]
    rewards: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def shown(self, task: Task, outcome: Episode | Exception, seen: Sequence[Completion]) -> str:
        """Return a rollout as text."""
        if isinstance(outcome, Exception):
            self.counts["failed"] += 1
            return f"failed: {type(outcome).__name__}: {outcome}"
        parts = [part for one in outcome.trajectories for part in self._trajectory(one, seen)]
        self._count_calls(outcome.trajectories[0].metadata, seen)
        return "\n".join([*parts, *self._rewards(task, outcome)])

    def summary(self) -> str:
        """Return what the rollouts have in common."""
        counts, mean = self.counts, np.mean(self.rewards) if self.rewards else float("nan")
        said = [
            f"{len(self.rewards)} rewards, {mean:.3g} in the mean; {counts['failed']} rollouts failed",
            f"{counts['ended']} answers ended by a stop token, {counts['cut']} cut off, "
            f"{counts['other']} ended otherwise",
            f"{counts['tool_calls']} tool calls, {counts['malformed_calls']} malformed",
        ]
        if counts["cut"] and not counts["ended"]:
            said.append("No answer ended by itself: look whether the stop tokens above are the model's")
        return "\n".join(said)

    def _trajectory(self, one: AgentTrajectory, seen: Sequence[Completion]) -> list[str]:
        """Return the contexts and answers of a trajectory, in order."""
        shown, at = [], 0
        for turn in one.turns:
            tokens = one.token_ids[turn.start : turn.stop]
            shown.append(self._block(f"context, {turn.start - at} tokens", one.token_ids[at : turn.start]))
            shown.append(
                self._block(f"answer, {len(tokens)} tokens, {self._end(tokens, turn.finish_reason)}", tokens)
            )
            at = turn.stop
            for completion in (found for found in seen if np.array_equal(found.token_ids, tokens)):
                shown += self._calls(completion)
                break
        return shown

    def _count_calls(self, noted: Mapping[str, Json], seen: Sequence[Completion]) -> None:
        """Count calls as an environment with tools has noted them, else those that the policy has parsed."""
        parsed = {
            "tool_calls": sum(len(one.tool_calls) for one in seen),
            "malformed_calls": sum(len(one.malformed_calls) for one in seen),
        }
        for name in parsed:
            self.counts[name] += integer(noted if name in noted else parsed, name)

    def _block(self, title: str, token_ids: np.ndarray) -> str:
        text = self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)
        return f"--- {title}\n{text}"

    def _end(self, tokens: np.ndarray, reason: str) -> str:
        last = int(tokens[-1]) if len(tokens) else -1
        if last in self.stops:
            self.counts["ended"] += 1
            return f"ended by {self.tokenizer.decode([last], skip_special_tokens=False)}"
        self.counts["cut" if reason == "length" else "other"] += 1
        return "cut off at its limit" if reason == "length" else f"ended as {reason}"

    def _calls(self, completion: Completion) -> list[str]:
        """Return the parts of an answer that are no plain content."""
        shown = [] if completion.reasoning is None else [f"--- reasoning: {completion.reasoning!r}"]
        shown += [f"--- call: {call.name} {call.arguments}" for call in completion.tool_calls]
        return shown + [f"--- malformed call: {text!r}" for text in completion.malformed_calls]

    def _rewards(self, task: Task, episode: Episode) -> list[str]:
        first = episode.trajectories[0]
        reward = first.reward if episode.outcome is None else episode.outcome
        due = " (comes later)" if first.reward_due else ""
        if not first.reward_due:
            self.rewards.append(reward)
        parts = "".join(f"\n    {name} {value:g}" for name, value in first.reward_components.items())
        return [f"--- reward {reward:g}{due}, label {task.label!r}, end {episode.end}{parts}"]


async def try_model(config: RunConfig, stop: asyncio.Event, *, count: int, say: Say) -> None:
    """Roll the first `count` prompts out once with the embedded engine, and `say` what came of it.

    Raises `ConfigError` for what a start would refuse, and for a run without a model of its own."""
    if config.model.path is None:
        raise ConfigError("launch try shows a model that exists: name one by --model.path")
    with TemporaryDirectory(prefix="sluice-try-") as scratch:
        prompts = await check_start(config, RunDirectory(Path(scratch), config.run), models=False)
        tasks = [
            Task.of(prompt, f"try-{number}", heldout=True)
            for number, prompt in enumerate(islice(prompts.training, count))
        ]
    for remark in start_remarks(config):
        say(remark)
    model = model_directory(pinned(config.model.path, RunDirectory(config.directory, config.run)))
    embedded = config.actors.engine.embedded
    disable_progress_bar()
    engine = await asyncio.to_thread(EmbeddedEngine.from_directory, model, embedded, policy_version=0)
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    stops = stop_token_ids(model, tokenizer)
    policy = WatchedPolicy(
        engine, tokenizer, Sampling.from_config(config.sampling, stops),
        tool_calls=config.actors.tool_calls, images=ImageChat.of(model, tokenizer),
    )  # fmt: skip
    trial = Trial(tokenizer, stops)
    await engine.start()
    try:
        async with built_environment(config.actors, stop, hidden_files(config)) as environment:
            if isinstance(environment, RunsOnDemand):
                raise ConfigError(
                    "actors.environment.type=clients: its tasks are taken by clients; try another"
                )
            await show(tasks, environment, policy, trial, say)
    finally:
        await engine.close()
    say(trial.summary())


async def show(
    tasks: Sequence[Task], environment: Environment, policy: WatchedPolicy, trial: Trial, say: Say
) -> None:
    """Roll all tasks out at once, and show them in order."""
    policies = [policy.watched() for _ in tasks]
    rollouts = (environment.run(task, own) for task, own in zip(tasks, policies, strict=True))
    outcomes = await asyncio.gather(*rollouts, return_exceptions=True)
    for number, (task, outcome, own) in enumerate(zip(tasks, outcomes, policies, strict=True), start=1):
        if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
            raise outcome
        say(f"=== prompt {number} of {len(tasks)}\n{trial.shown(task, outcome, own.seen)}")
