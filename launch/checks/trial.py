"""`launch try`: a model, its template, environment and reward on a few prompts, without training, as text in
which what is trained has a colour."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.text import Text

from actors.engines.base import Sampling
from actors.environments.base import DEFAULT_AGENT, Environment
from actors.environments.build import built_environment
from actors.episodes.episode import AgentTrajectory, Episode
from actors.episodes.task import Task
from actors.policy.chat_format import Tokenizer
from actors.policy.messages import Completion
from actors.policy.policy import Policy
from actors.settings.evaluation import ChatEndpointConfig
from bus.codec import Json
from bus.errors import ConfigError
from bus.process.work_progress import long_work
from launch.checks.answering_model import answering_model, refuse_clients
from launch.checks.start_checks import check_start, start_remarks
from launch.services.hidden_files import hidden_files
from launch.settings.run_config import RunConfig
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import integer

Say = Callable[[str | Text], None]
TRAINED = "green"
"""Colour of the tokens that are trained."""


class WatchedPolicy(Policy):
    """Notes the completions of one rollout as its environment gets them."""

    seen: list[Completion]

    def watched(self) -> Self:
        """Return a policy for one more rollout, which shares the engine."""
        policy = copy(self)
        policy.seen = []
        return policy

    async def chat(self, *args: Any, **asked: Any) -> Completion:
        return self._noted(await super().chat(*args, **asked))

    async def generate(self, *args: Any, **asked: Any) -> Completion:
        return self._noted(await super().generate(*args, **asked))

    async def go_on(self, *args: Any, **asked: Any) -> Completion:
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

    def shown(
        self, task: Task, outcome: Episode | Exception, seen: Sequence[Completion], seconds: float
    ) -> Text:
        """Return a rollout, which took so many seconds, as text."""
        if isinstance(outcome, Exception):
            self.counts["failed"] += 1
            return Text(f"failed: {type(outcome).__name__}: {outcome}")
        parts = [part for one in outcome.trajectories for part in self._trajectory(one, seen)]
        said = [_account(outcome.trajectories, seconds), *self._rewards(task, outcome)]
        self._count_calls(outcome.trajectories[0].metadata, seen)
        return Text("\n").join([*parts, *map(Text, said)])

    def summary(self) -> str:
        counts, rewards = self.counts, self.rewards
        mean = f"{len(rewards)} rewards, {np.mean(rewards):.3g} in the mean" if rewards else "no reward"
        said = [
            f"{mean}; {counts['failed']} rollouts failed",
            f"{counts['ended']} answers ended by a stop token, {counts['cut']} cut off, "
            f"{counts['other']} ended otherwise",
            f"{counts['tool_calls']} tool calls, {counts['malformed_calls']} malformed",
        ]
        if counts["cut"] and not counts["ended"]:
            said.append("No answer ended by itself: look whether the stop tokens above are the model's")
        return "\n".join(said)

    def _trajectory(self, one: AgentTrajectory, seen: Sequence[Completion]) -> list[Text]:
        shown, at = [Text(f"--- agent {one.agent}")] if one.agent != DEFAULT_AGENT else [], 0
        for turn in one.turns:
            tokens, mask = (part[turn.start : turn.stop] for part in (one.token_ids, one.loss_mask))
            context = one.token_ids[at : turn.start]
            shown.append(self._block(f"context, {len(context)} tokens", context, np.zeros_like(context)))
            masked = "" if mask.all() else f", {int(mask.sum())} of them trained"
            title = f"answer, {len(tokens)} tokens{masked}, {self._end(tokens, turn.finish_reason)}"
            shown.append(self._block(title, tokens, mask))
            at = turn.stop
            for completion in (found for found in seen if np.array_equal(found.token_ids, tokens)):
                shown += map(Text, self._calls(completion))
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

    def _block(self, title: str, token_ids: np.ndarray, mask: np.ndarray) -> Text:
        shown = Text(f"--- {title}\n")
        for is_trained, places in groupby(range(len(token_ids)), lambda place: bool(mask[place])):
            text = self.tokenizer.decode(token_ids[[*places]].tolist(), skip_special_tokens=False)
            shown.append(text, style=TRAINED if is_trained else "")
        return shown

    def _end(self, tokens: np.ndarray, reason: str) -> str:
        last = int(tokens[-1]) if len(tokens) else -1
        if last in self.stops:
            self.counts["ended"] += 1
            return f"ended by {self.tokenizer.decode([last], skip_special_tokens=False)}"
        self.counts["cut" if reason == "length" else "other"] += 1
        return "cut off at its limit" if reason == "length" else f"ended as {reason}"

    def _calls(self, completion: Completion) -> list[str]:
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


def _account(trajectories: Sequence[AgentTrajectory], seconds: float) -> str:
    turns = sum(len(one.turns) for one in trajectories)
    trained = sum(int(one.loss_mask.sum()) for one in trajectories)
    tokens = sum(len(one.token_ids) for one in trajectories)
    return (
        f"--- {len(trajectories)} trajectories, {turns} turns; {trained} of {tokens} tokens are trained; "
        f"{seconds:.2f} s"
    )


@contextmanager
def shown_on(page: Path | None) -> Iterator[Say]:
    """Yield what prints, and write the same to a page of HTML at the end, if one is named. Raises
    `ConfigError` where it cannot be written."""
    if page is not None:
        try:
            page.open("a").close()
        except OSError as error:
            raise ConfigError(f"--page {page}: {error.strerror}: name a file elsewhere") from error
    console = Console(record=page is not None)
    try:
        yield partial(console.print, markup=False, highlight=False, emoji=False, soft_wrap=True)
    finally:
        if page is not None:
            console.save_html(str(page))


async def try_model(
    config: RunConfig, stop: asyncio.Event, *, count: int, say: Say,
    endpoint: ChatEndpointConfig | None = None,
) -> None:  # fmt: skip
    """Roll the first `count` prompts out once, and `say` what came of it. Raises `ConfigError` for what a
    start would refuse, and where there is no model to ask."""
    if config.model.path is None and endpoint is None:
        raise ConfigError("launch try shows a model that exists: name one by --model.path, or by --url")
    with TemporaryDirectory(prefix="sluice-try-") as scratch:
        run = RunDirectory(Path(scratch), config.run)
        prompts, _ = await check_start(config, run, models=False)
        tasks = [
            Task.of(prompt, f"try-{number}", heldout=True)
            for number, prompt in enumerate(islice(prompts.training, count))
        ]
    for remark in start_remarks(config):
        say(remark)
    async with answering_model(config, endpoint, embedded=True) as model:
        policy = WatchedPolicy(
            model.engine, model.tokenizer, Sampling.from_config(config.sampling, model.stops),
            tool_calls=config.actors.tool_calls, images=model.images,
        )  # fmt: skip
        trial = Trial(model.tokenizer, model.stops)
        async with built_environment(config.actors, stop, hidden_files(config)) as environment:
            refuse_clients(environment)
            await show(tasks, environment, policy, trial, say)
    say(trial.summary())


async def show(
    tasks: Sequence[Task], environment: Environment, policy: WatchedPolicy, trial: Trial, say: Say
) -> None:
    """Roll all tasks out at once, and show them in order."""
    policies = [policy.watched() for _ in tasks]

    async def rolled_out(task: Task, own: WatchedPolicy) -> tuple[Episode | Exception, float]:
        began_s = monotonic()
        try:
            return await environment.run(task, own), monotonic() - began_s
        except Exception as error:  # noqa: BLE001 - it is shown as what became of its prompt
            return error, monotonic() - began_s

    with long_work("rolling the prompts out"):
        outcomes = await asyncio.gather(*map(rolled_out, tasks, policies))
    for number, (task, (outcome, seconds), own) in enumerate(zip(tasks, outcomes, policies, strict=True), 1):
        shown = trial.shown(task, outcome, own.seen, seconds)
        say(Text(f"=== prompt {number} of {len(tasks)}\n").append(shown))
