"""Runs the program that posts an agent's reward, and says who is to blame where it fails."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from actors.environments.agent_program import needed_files, placed_command
from actors.environments.session_episode import UnpaidError, with_metadata
from actors.episodes.task import Task
from actors.gateway.posted_reward import PostedReward
from actors.gateway.server import Gateway
from actors.gateway.session import Session
from actors.policy.policy import Policy
from actors.programs.runner import Program, ProgramEnd, ProgramError, ProgramFailedError, ProgramRunner
from actors.rewards.answer_faults import HostFaultError, verified
from actors.rewards.base import RewardError
from actors.settings.agents import AgentConfig

NOTHING = "an empty directory and answer"
Run = Callable[[Program, float], Awaitable[ProgramEnd]]
"""Runs a program within seconds."""


@dataclass(frozen=True, slots=True)
class LeftByAgent:
    """What an agent left to be judged, and the session whose reward that is."""

    session: Session
    directory: Path
    answer: str


class Verifier:
    """Has a program judge what agents leave. It must judge nothing at all, an empty directory and an empty
    answer, as it judges anything that is wrong: it is asked that before its first judgement, and again
    whenever it fails, to see who is to blame."""

    def __init__(
        self, config: AgentConfig, runner: ProgramRunner, gateway: Gateway, *,
        run: Run, variables: Callable[[], dict[str, str]], base: Callable[[], str],
    ) -> None:  # fmt: skip
        self._config = config
        self._runner = runner
        self._gateway = gateway
        self._run = run
        self._variables = variables
        self._base = base
        """Returns where programs reach the gateway."""
        self._trying = asyncio.Lock()
        self._judges_nothing = False
        """Whether the program has judged nothing at all once."""

    async def reward(self, task: Task, policy: Policy, left: LeftByAgent) -> PostedReward:
        """Return the reward that the verifier posts. Raises `AnswerFaultError` where it fails on what was
        left alone, and `RewardError` where it fails anyway."""
        where = f"the verifier {self._config.verifier!r} on task {task.task_id}"
        once = partial(self._once, task, policy)
        async with self._trying:
            if not self._judges_nothing:
                try:
                    await once(None)
                except RewardError as error:
                    raise RewardError(
                        f"{where} fails on {NOTHING}, which it has to pay as it pays what is wrong: {error}"
                    ) from error
                self._judges_nothing = True
        return await verified(
            once, left, control=None, control_name=NOTHING, where=where,
            lowest=self._config.lowest or 0.0, passing=(Exception,),
        )  # fmt: skip

    async def _once(self, task: Task, policy: Policy, left: LeftByAgent | None) -> PostedReward:
        """Return the reward of what was left; of nothing in a session of its own."""
        try:
            if left is not None:
                return await self._posted(task, left)
            with self._runner.directory() as empty:
                async with self._gateway.session(policy.fresh(task.task_id), task.task_id) as session:
                    return await self._posted(task, LeftByAgent(session, empty, ""))
        except ProgramFailedError as error:
            raise RewardError(str(error)) from error.__cause__
        except (OSError, ValueError, ProgramError) as error:
            raise HostFaultError(f"the verifier on task {task.task_id}: {error}") from error

    async def _posted(self, task: Task, left: LeftByAgent) -> PostedReward:
        left.session.reward_owner = "verifier"
        arguments = self._config.verifier_arguments
        given = {
            **with_metadata(task, task.metadata),
            "label": task.label,
            "answer": left.answer,
            "directory": str(left.directory),
            "reward_url": self._gateway.reward_url_of(left.session, self._base()),
        }
        with self._runner.directory() as directory:
            program = Program(
                command=placed_command(arguments),
                variables=self._variables(),
                directory=directory,
                handed=json.dumps(given).encode(),
                readable=(left.directory, *needed_files(arguments)),
            )
            ended = await self._run(program, self._config.reward_timeout_s)
        if ended.status != 0:
            raise RewardError(f"status {ended.status}: {ended.output}")
        if left.session.reward is None:
            raise UnpaidError(
                f"nobody posted a reward for task {task.task_id}: have the verifier POST a number to the "
                "reward_url that it reads on its standard input, or set another actors.environment.reward"
            )
        return left.session.reward
