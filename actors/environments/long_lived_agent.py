"""Anybody's agent as a program that lives as long as the actor: it takes tasks, and plays many at once."""

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import structlog

from actors.environments.agent import AgentEnvironment
from actors.environments.agent_program import check_program, needed_files, placed_command, program_variables
from actors.environments.clients import ClientsEnvironment
from actors.environments.session_episode import scoring_of
from actors.episodes.episode import Episode, FailedEpisode
from actors.episodes.task import Task
from actors.gateway.task_offers import Taker
from actors.policy.policy import Policy
from actors.programs.runner import Program, ProgramEnd, ProgramError, ProgramRunner
from actors.rewards.scoring.answer_scoring import AnswerScoring
from actors.settings.agents import AgentConfig
from actors.settings.clients import ClientsConfig
from actors.settings.groups import InterruptionConfig
from bus.waiting import cancelled

log = structlog.get_logger()
KEY_OF_THE_TASK = "use-the-session-of-the-task"
"""API key in the program's environment: clients want one, and each task has its own."""
SOON_S = 1e-3
"""Shortest time that episodes get after a stop."""
LOOK_S = 1.0
"""Seconds after which a program that hangs is noticed."""
RESTART_S, MOST_DOUBLINGS = 1.0, 6
"""Time before a program is started again, and how often it doubles while none takes a task."""


@dataclass(eq=False)
class _Program:
    ends_in_vain: int = 0
    """Times in a row that the program ended without having taken a task."""
    taker: Taker | None = None
    """Who takes tasks for the program while it runs."""

    @property
    def may_take_tasks(self) -> bool:
        """Return whether the program may take tasks: its last start has not failed, or it plays."""
        return not self.ends_in_vain or (self.taker is not None and self.taker.taken > 0)


class LongLivedAgent:
    """Offers each rollout to the programs that it keeps running, and waits until it is played."""

    trajectories_per_episode: int | None = None

    def __init__(self, config: AgentConfig, scoring: AnswerScoring | None, finish_within_s: float) -> None:
        self._config = config
        self._runner = ProgramRunner(config.isolation, config.programs)
        limits = ClientsConfig(
            claim_timeout_s=inf,  # what waits may wait for others that take long
            idle_timeout_s=config.program_timeout_s,
            episode_timeout_s=config.program_timeout_s,
            shown_metadata=config.shown_metadata,
            unfinished_reward=config.unfinished_reward,
            failed_reward=config.failed_reward,
            drain_timeout_s=max(finish_within_s, SOON_S),
            gateway=config.gateway,
        )
        token = secrets.token_urlsafe(24)  # nobody learns this token: only programs take tasks
        self._clients = ClientsEnvironment(limits, scoring, token)
        self.reward_times = self._clients.reward_times
        self._starting = asyncio.Lock()
        self._stop = asyncio.Event()
        self._programs: list[_Program] = []
        self._running: list[asyncio.Task[None]] = []

    def stop_with(self, stop: asyncio.Event) -> None:
        """Offer no rollout after `stop`, and give back those that are played when their time is over."""
        self._stop = stop

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Have a program roll `task` out once. Raises EngineError, RewardError, EpisodeError for what the
        program did, or HandBackError where this process ends."""
        async with self._starting:
            if not self._programs:
                await self._clients.open(self._stop)
                self._programs = [_Program() for _ in range(self._config.programs)]
                self._running = [
                    asyncio.create_task(self._keep_running(one), name="agent") for one in self._programs
                ]
        for ended in filter(asyncio.Task.done, self._running):
            ended.result()  # a task ends by a mistake of ours alone
        return await self._clients.run(task, policy)

    async def score_group(self, episodes: Mapping[int, Episode]) -> Mapping[int, Episode | FailedEpisode]:
        """Return the episodes of a group with their final rewards; raises RewardError."""
        return await self._clients.score_group(episodes)

    async def close(self) -> None:
        await cancelled(*self._running)
        await self._runner.close()
        await self._clients.close()

    async def _keep_running(self, program: _Program) -> None:
        """Run a program, and start it again whenever it ends: later each time that it took no task. Rollouts
        that wait fail once no program is left that may take them."""
        while True:
            with self._clients.program(self._base) as (path, taker):
                program.taker = taker
                reason = await self._run_program(f"{self._base}{path}", taker)
                taker.gone = f"its program has ended: {reason}"
            program.taker = None
            log.warning("agent_program_ended", command=self._config.command, reason=reason, tasks=taker.taken)
            program.ends_in_vain = 0 if taker.taken else program.ends_in_vain + 1
            if not any(one.may_take_tasks for one in self._programs):
                self._clients.refuse(f"the program {self._config.command!r} takes no task: {reason}")
            await asyncio.sleep(RESTART_S * 2 ** min(program.ends_in_vain, MOST_DOUBLINGS))

    async def _run_program(self, tasks_url: str, taker: Taker) -> str:
        """Run the program until it ends or hangs; return why it is no longer there."""
        config, gateway = self._config, self._clients.gateway
        variables = program_variables(config, self._base, KEY_OF_THE_TASK, {})
        with self._runner.directory() as directory:
            program = Program(
                command=placed_command(config.arguments),
                variables=variables,
                directory=directory,
                handed=json.dumps({"tasks_url": tasks_url}).encode(),
                readable=needed_files(config.arguments),
            )
            running = asyncio.create_task(
                self._runner.run(
                    program, timeout_s=None, most_output_bytes=None,
                    port=gateway.port, serve=gateway.listening,
                )
            )  # fmt: skip
            return await self._until_it_ends(running, taker)

    async def _until_it_ends(self, running: "asyncio.Task[ProgramEnd]", taker: Taker) -> str:
        """Return why the program is no longer there; one that hangs is ended."""
        config = self._config
        try:
            while not running.done():
                await asyncio.wait([running], timeout=LOOK_S)
                idle_s = time.monotonic() - taker.last_request_s
                if self._clients.offered and not taker.sessions and idle_s > config.program_timeout_s:
                    return f"it took no task for {idle_s:.0f} s, and was ended"
            ended = running.result()
        except (ProgramError, OSError, ValueError) as error:  # no descriptors, or a wrong variable
            return str(error)
        finally:
            await cancelled(running)
        return f"status {ended.status}: {ended.output}"

    @property
    def _base(self) -> str:
        gateway = self._clients.gateway
        return gateway.url if not self._runner.gives_network else f"http://127.0.0.1:{gateway.port}"


def agent_environment(
    config: AgentConfig, *, finish_within_s: float = InterruptionConfig().finish_within_s
) -> AgentEnvironment | LongLivedAgent:
    """Build the environment of a program for each episode, or of a long-lived one. Raises `ConfigError` as
    `AgentEnvironment.from_config` does."""
    if not config.long_lived:
        return AgentEnvironment.from_config(config, finish_within_s=finish_within_s)
    check_program(config)
    return LongLivedAgent(config, scoring_of(config), finish_within_s)
