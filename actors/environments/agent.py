"""Anybody's agent: a program for each episode. It asks the gateway, whose recording is trained on."""

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import structlog

from actors.environments.agent_program import check_program, needed_files, placed_command, program_variables
from actors.environments.agent_sandbox import SandboxedPrograms
from actors.environments.agent_verifier import LeftByAgent, Verifier
from actors.environments.session_episode import (
    TaskDescriptions,
    UnpaidError,
    posted_episode,
    scored_episode,
    scoring_of,
    unscored_episode,
)
from actors.episodes.episode import Episode, FailedEpisode
from actors.episodes.errors import EpisodeError, LatestUses
from actors.episodes.task import JSON, Task
from actors.gateway.posted_reward import PostedReward
from actors.gateway.server import Gateway
from actors.gateway.session import Session
from actors.policy.policy import Policy
from actors.programs.runner import Program, ProgramEnd, ProgramError, ProgramFailedError, ProgramRunner
from actors.rewards.base import AnswerFaultError
from actors.rewards.scoring.answer_scoring import AnswerScoring
from actors.rewards.scoring.call_times import CallTimes
from actors.settings.agents import AgentConfig
from actors.settings.groups import InterruptionConfig
from bus.errors import HandBackError
from bus.waiting import cancelled, ended_before, set_within

log = structlog.get_logger()
NO_SESSION = "a-verifier-has-no-session"
"""API key in a verifier's environment: it asks the policy nothing."""
SIGNALLED_S = 0.2
"""Time in which an actor hears of the signal that ends it. Its programs may have ended by the same one."""
LONG_WAIT_S = 30.0
"""Time of a request that the engine left unanswered, after which a client that gave up is not to blame."""


class ProgramFaultError(EpisodeError):
    """A program failed after it had asked the policy: where others work, what the policy wrote did it."""


class AgentEnvironment:
    """Starts the program for each task, and waits until it ends."""

    trajectories_per_episode: int | None = None  # a program may rewrite its context, or have several

    def __init__(self, config: AgentConfig, scoring: AnswerScoring | None, finish_within_s: float) -> None:
        self._config = config
        self._runner = ProgramRunner(config.isolation, config.programs + config.heldout_programs)
        self._descriptions = TaskDescriptions(config.shown_metadata)
        self._finish_within_s = finish_within_s
        self._scoring = scoring
        """Computes rewards; None where programs post them."""
        self.reward_times: tuple[CallTimes, ...] = () if scoring is None else scoring.times
        self._gateway = Gateway(config.gateway)
        self._sandboxed = None if config.sandbox is None else SandboxedPrograms(config, self._gateway)
        self._latest = LatestUses()
        """Programs whose episodes were scored."""
        self._verifier = None if config.verifier is None else self._built_verifier()
        self._starting = asyncio.Lock()
        self._is_serving = False
        self._places = {
            False: asyncio.Semaphore(config.programs),
            True: asyncio.Semaphore(config.heldout_programs),
        }
        """Places of training, and of held-out tasks."""
        self._stop = asyncio.Event()

    @classmethod
    def from_config(
        cls, config: AgentConfig, *, finish_within_s: float = InterruptionConfig().finish_within_s
    ) -> Self:
        """Build; programs get `finish_within_s` to end after a stop. Raises `ConfigError` for a program that
        is not there, or that this host does not allow, and for rewards that nobody posts."""
        check_program(config)
        return cls(config, scoring_of(config), finish_within_s)

    def _built_verifier(self) -> Verifier:
        return Verifier(
            self._config, self._runner, self._gateway, run=self._run, base=lambda: self._base,
            variables=lambda: program_variables(self._config, self._base, NO_SESSION, {}),
        )  # fmt: skip

    def stop_with(self, stop: asyncio.Event) -> None:
        """Start no program after `stop`, and end those that run when their time is over."""
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
                await asyncio.wait([playing], timeout=self._finish_within_s)
            if not playing.done():
                raise HandBackError(f"the program of task {task.task_id} was not done at the stop")
            return playing.result()
        finally:
            await cancelled(playing)

    async def _played(self, task: Task, policy: Policy) -> Episode:
        async with self._places[task.heldout], self._gateway.session(policy, task.task_id) as session:
            if self._stop.is_set():
                raise HandBackError(f"no program was started for task {task.task_id} before the stop")
            try:
                with self._runner.directory() as work:
                    return await self._led(task, policy, session, work)
            except (OSError, ProgramError) as error:
                raise self._failed(task, f"has no directory: {error!r}") from error

    async def _led(self, task: Task, policy: Policy, session: Session, work: Path) -> Episode:
        """Return the episode of a session whose program works in `work`. It has the lowest reward where the
        policy kept it from being scored."""
        session.reward_owner = "program" if self._config.program_owns_reward else None
        try:
            episode = await self._scored(task, policy, session, work)
        except (ProgramFaultError, AnswerFaultError, UnpaidError) as fault:
            if await set_within(self._stop, SIGNALLED_S):
                raise HandBackError(f"task {task.task_id} ended with its actor: {fault}") from fault
            lowest = self._latest.lowest(self._config.lowest)
            self._latest.note(worked=False)
            if isinstance(fault, ProgramFaultError) and (stated := self._config.failed_reward) is not None:
                return unscored_episode(policy, session, stated, str(fault))
            if lowest is None or not self._is_the_policys(fault, session):
                raise
            return unscored_episode(policy, session, lowest, str(fault))
        self._latest.note(worked=True, reward=min(part.reward for part in episode.trajectories))
        return episode

    def _is_the_policys(self, fault: Exception, session: Session) -> bool:
        if isinstance(fault, AnswerFaultError):  # the verifier may find nothing wrong with nothing, and fail
            return self._latest.work
        return bool(session.end) or (self._latest.work and session.unanswered_s < LONG_WAIT_S)

    async def _scored(self, task: Task, policy: Policy, session: Session, work: Path) -> Episode:
        """Run the program, and return its episode with its reward. Raises the errors of `run`, of which the
        policy may have caused `ProgramFaultError`, `AnswerFaultError` and `UnpaidError`."""
        try:
            found = await self._run_program(task, session, work)
        finally:
            await session.close()  # what the program left behind at the engine is no part of its episode
        last = session.last
        if last is None:
            asked = "nothing that is trained and its own: look at gateway.rules and X-Sluice-Trained"
            nothing = "nothing: does it heed OPENAI_BASE_URL?"
            raise self._failed(task, f"it asked the policy {asked if session.agents else nothing}")
        if self._scoring is not None:
            return await scored_episode(self._scoring, policy, session, task, last, found=found)
        if self._verifier is None:
            return posted_episode(policy, session, await self._reward(task, session))
        left = LeftByAgent(session, work, str(last.message["content"]))
        return posted_episode(policy, session, await self._verifier.reward(task, policy, left))

    async def score_group(self, episodes: Mapping[int, Episode]) -> Mapping[int, Episode | FailedEpisode]:
        """Return the episodes of a group with their final rewards; raises RewardError."""
        return episodes if self._scoring is None else await self._scoring.score_group(episodes)

    async def close(self) -> None:
        """Close the gateway, and give up the rewards' connections and processes."""
        if self._sandboxed is not None:
            await self._sandboxed.close()
        await self._runner.close()
        await self._gateway.close()
        if self._scoring is not None:
            await self._scoring.close()

    async def _serve(self) -> None:
        async with self._starting:
            if not self._is_serving:
                await self._gateway.start()
                self._is_serving = True

    async def _run_program(self, task: Task, session: Session, work: Path) -> Mapping[str, JSON]:
        """Run the program, and return what was found of what it left; a failure of the engine explains every
        other one."""
        found: Mapping[str, JSON] = {}
        description = json.dumps(self._descriptions.of(task))
        try:
            if self._sandboxed is not None:
                ended, found = await self._sandboxed.run(task, session, description, work)
            else:
                ended = await self._run_here(task, session, description, work)
        except (OSError, ValueError) as error:  # no space for its files, no descriptors, a wrong variable
            raise self._failed(task, f"cannot be run: {error!r}") from error
        except ProgramError as error:
            raise session.failure or self._blamed(task, session, error) from error.__cause__
        if session.failure is not None:
            raise session.failure
        if ended.status != 0:
            self._look_at(task, session, ended)
        return found

    async def _run_here(self, task: Task, session: Session, description: str, work: Path) -> ProgramEnd:
        with self._runner.directory() as directory:
            path = directory / "task.json"
            path.write_text(description)
            path.chmod(0o644)
            program = Program(
                command=placed_command(self._config.arguments),
                variables=self._variables(session, path),
                directory=work,
                handed=self._handed(task, session),
                readable=(directory, *needed_files(self._config.arguments)),
            )
            return await self._run(program, self._config.program_timeout_s)

    def _blamed(self, task: Task, session: Session, error: ProgramError) -> EpisodeError:
        """Return the error of a program that did not end by itself, by whose fault it is: the engine's where
        one request took half of the time since the first one."""
        asked_for_s = time.monotonic() - (session.first_request_s or 0.0)
        waited = session.longest_wait_s > asked_for_s / 2
        late = isinstance(error.__cause__, TimeoutError) and waited
        blamed = isinstance(error, ProgramFailedError) and session.last is not None and not late
        return self._failed(task, str(error), ProgramFaultError if blamed else EpisodeError)

    async def _run(self, program: Program, timeout_s: float) -> ProgramEnd:
        return await self._runner.run(
            program,
            timeout_s=timeout_s,
            most_output_bytes=self._config.most_output_bytes,
            port=self._gateway.port,
            serve=self._gateway.listening,
        )

    def _look_at(self, task: Task, session: Session, ended: ProgramEnd) -> None:
        """Raise an error for a program that failed, unless the gateway refused to go on with it."""
        if session.end is None:
            kind = EpisodeError if session.last is None else ProgramFaultError
            raise self._failed(task, f"status {ended.status}: {ended.output}", kind)
        log.info("agent_was_cut_off", task=task.task_id, cause=session.end_cause, status=ended.status)

    async def _reward(self, task: Task, session: Session) -> PostedReward:
        """Return the reward that the program posted. Raises `UnpaidError` where none is in time."""
        if await session.rewarded_within(0.0 if session.end else self._config.reward_timeout_s):
            assert session.reward is not None
            return session.reward
        if session.end_cause:
            raise UnpaidError(f"task {task.task_id} has no reward: {session.end_cause}")
        raise UnpaidError(
            f"nobody posted a reward for task {task.task_id}: have the program POST a number to the "
            "reward_url that it reads on its standard input, or set another actors.environment.reward"
        )

    def _handed(self, task: Task, session: Session) -> bytes | None:
        """Return what the program reads on its standard input, which is gone once it is read."""
        if not self._config.program_owns_reward:
            return None
        reward_url = self._gateway.reward_url_of(session, self._base)
        given = {"label": task.label, "metadata": dict(task.metadata), "reward_url": reward_url}
        return json.dumps(given).encode()

    @property
    def _base(self) -> str:
        return (
            self._gateway.url if not self._runner.gives_network else f"http://127.0.0.1:{self._gateway.port}"
        )

    def _variables(self, session: Session, task: Path) -> dict[str, str]:
        url = self._gateway.url_of(session, self._base)
        return program_variables(self._config, url, session.key, {"SLUICE_TASK": str(task)})

    def _failed(self, task: Task, reason: str, kind: type[EpisodeError] = EpisodeError) -> EpisodeError:
        return kind(f"the program {self._config.command!r} on task {task.task_id}: {reason}")
