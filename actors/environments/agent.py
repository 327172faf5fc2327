"""Anybody's agent: a program for each episode. It asks the gateway, whose recording is trained on."""

import asyncio
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import structlog

from actors.environments.agent_config import AgentConfig
from actors.environments.agent_program import (
    STOP_S,
    ProgramEnd,
    ProgramError,
    check_program,
    program_variables,
    run_program,
)
from actors.environments.answer_scoring import AnswerScoring
from actors.environments.base import Episode, EpisodeError, FailedEpisode, Task
from actors.environments.session_episode import posted_episode, scored_episode, scoring_of
from actors.gateway.posted_reward import PostedReward
from actors.gateway.server import Gateway
from actors.gateway.session import Session
from actors.policy.policy import Policy
from actors.rewards.base import RewardError
from actors.rewards.call_times import CallTimes
from bus.errors import HandBackError
from bus.waiting import cancelled, ended_before

log = structlog.get_logger()


class AgentEnvironment:
    """Starts the program for each task, and waits until it ends."""

    trajectories_per_episode: int | None = None  # a program may rewrite its context, or have several

    def __init__(self, config: AgentConfig, scoring: AnswerScoring | None) -> None:
        self._config = config
        self._scoring = scoring
        """Computes rewards; None where programs post them."""
        self._gateway = Gateway(config.gateway)
        self._starting = asyncio.Lock()
        self._is_serving = False
        self._places = asyncio.Semaphore(config.programs)
        self._stop = asyncio.Event()

    @classmethod
    def from_config(cls, config: AgentConfig) -> Self:
        """Build. Raises `ConfigError` for a program that is not there, or that this host does not allow."""
        check_program(config)
        return cls(config, scoring_of(config))

    @property
    def reward_times(self) -> tuple[CallTimes, ...]:
        """Return how long its rewards take."""
        return self._scoring.times if self._scoring is not None else ()

    def stop_with(self, stop: asyncio.Event) -> None:
        """Start no program after `stop`, and end those that run `STOP_S` later."""
        self._stop = stop

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Roll `task` out once. Raises EngineError, RewardError, EpisodeError for what the program did, or
        HandBackError where this process ends."""
        await self._serve()
        playing = asyncio.create_task(
            self._played(task, policy.fresh(task.task_id)), name=f"agent {task.task_id}"
        )
        try:
            if not await ended_before(self._stop, playing):
                await asyncio.wait([playing], timeout=STOP_S)
            if not playing.done():
                raise HandBackError(f"the program of task {task.task_id} was not done at the stop")
            return playing.result()
        finally:
            await cancelled(playing)

    async def _played(self, task: Task, policy: Policy) -> Episode:
        """Return the episode that a program plays."""
        async with self._places, self._gateway.session(policy, task.task_id) as session:
            if self._stop.is_set():
                raise HandBackError(f"no program was started for task {task.task_id} before the stop")
            session.posts_rewards = self._scoring is None
            await self._run_program(task, session)
            await session.close()  # what the program left behind at the engine is no part of its episode
            last = session.last
            if last is None:
                raise self._failed(task, "it asked the policy nothing: does it heed OPENAI_BASE_URL?")
            if self._scoring is None:
                return posted_episode(policy, session, await self._reward(task, session))
            return await scored_episode(self._scoring, policy, session, task, last)

    async def score_group(self, episodes: Mapping[int, Episode]) -> Mapping[int, Episode | FailedEpisode]:
        """Return the episodes of a group with their final rewards; raises RewardError."""
        return episodes if self._scoring is None else await self._scoring.score_group(episodes)

    async def close(self) -> None:
        """Close the gateway, and give up the rewards' connections and processes."""
        await self._gateway.close()
        if self._scoring is not None:
            await self._scoring.close()

    async def _serve(self) -> None:
        async with self._starting:
            if not self._is_serving:
                await self._gateway.start()
                self._is_serving = True

    async def _run_program(self, task: Task, session: Session) -> None:
        """Run the program; a failure of the engine explains every other one."""
        try:
            with tempfile.TemporaryDirectory(prefix="sluice-agent-") as directory:
                path = Path(directory) / "task.json"
                path.write_text(json.dumps(self._described(task)))
                ended = await run_program(
                    self._config.arguments,
                    self._variables(session, path),
                    timeout_s=self._config.program_timeout_s,
                    most_output_bytes=self._config.most_output_bytes,
                )
        except (OSError, ValueError) as error:  # no space for its files, no descriptors, a wrong variable
            raise self._failed(task, f"cannot be run: {error!r}") from error
        except ProgramError as error:
            raise session.failure or self._failed(task, str(error)) from error.__cause__
        if session.failure is not None:
            raise session.failure
        if ended.status != 0:
            self._look_at(task, session, ended)

    def _look_at(self, task: Task, session: Session, ended: ProgramEnd) -> None:
        """Raise `EpisodeError` for a program that failed, unless the gateway refused to go on with it."""
        if session.end is None:
            raise self._failed(task, f"status {ended.status}: {ended.output}")
        log.info("agent_was_cut_off", task=task.task_id, end=session.end, status=ended.status)

    async def _reward(self, task: Task, session: Session) -> PostedReward:
        """Return the reward that the program posts. Raises RewardError where it posts none in time."""
        if await session.rewarded_within(0.0 if session.end else self._config.reward_timeout_s):
            assert session.reward is not None
            return session.reward
        if session.end and self._config.unfinished_reward is not None:
            return PostedReward(reward=self._config.unfinished_reward)
        raise RewardError(
            f"the program posted no reward for task {task.task_id}: POST a number to SLUICE_REWARD_URL, or "
            "set another actors.environment.reward"
        )

    def _described(self, task: Task) -> dict[str, object]:
        """Return the task for its program, with the label only if the program computes the reward."""
        described = {"task_id": task.task_id, "prompt": task.prompt, "metadata": dict(task.metadata)}
        described |= {"tools": list(task.tools)} if task.tools else {}
        return {**described, **({"label": task.label} if self._scoring is None else {})}

    def _variables(self, session: Session, task: Path) -> dict[str, str]:
        url = self._gateway.url_of(session)
        own = {"SLUICE_REWARD_URL": f"{url}/reward", "SLUICE_TASK": str(task)}
        return program_variables(self._config, url, session.key, own)

    def _failed(self, task: Task, reason: str) -> EpisodeError:
        return EpisodeError(f"the program {self._config.command!r} on task {task.task_id}: {reason}")
