"""Calls rewards with a sample answer before a run starts: one that never works is found at once. A reward of
the user's own is called in another process, which ends with the call: what it loads, such as a model on a
GPU, stays there."""

import asyncio
import json
import os
import pickle
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from actors.episodes.task import Answer
from actors.rewards.base import InvalidRewardError, RewardError
from actors.rewards.endpoint import TransientError
from actors.rewards.scoring.bounded_calls import CallHangsError
from actors.rewards.scoring.scorers import GroupScorer, Scorer
from actors.settings.rewards import RewardConfig
from bus.errors import TRACEBACK_CHARACTERS, ConfigError, with_traceback
from bus.process.child_process import ask_child

log = structlog.get_logger()
LOADING_S = 300.0
"""Longest time in which the process has to load the reward's module, beside the time of a call."""
LARGE = "reward_model"
"""Built-in reward that loads so much that it is tried in another process."""
OTHER_TEXT = "This is a sentence, and no answer."
"""Text with which a reward of the user's own is called too: many return nothing for a wrong answer."""
ATTEMPTS = 2
"""Requests to a server, which may be started after the run."""
CHILD = "import sys; sys.path[:] = sys.argv[1:]; from actors.rewards.scoring.sample_call import main; main()"


@dataclass(frozen=True, slots=True)
class SampleCall:
    """A reward of a run, and the answer that it is called with."""

    where: str
    """Where the prompt of the answer comes from, for a human."""
    name: str
    config: RewardConfig
    answer: Answer


async def check_calls(calls: Sequence[SampleCall]) -> None:
    """Call each reward, and the group reward with two answers. Raises `ConfigError`, with the traceback, for
    a reward that raises, takes too long, or returns what is no reward. A server that cannot be reached yet is
    logged only."""
    for call in calls:
        own = ":" in call.name or call.name == LARGE or call.config.group_reward is not None
        reason = await (_told_by_another_process(call) if own else failure(call))
        if reason:
            raise ConfigError(
                f"{call.where}: the reward {call.name!r} does not work on a sample answer, "
                f"{call.answer.text[:100]!r}: {reason}\n"
                "Have it return a number for any text, or raise actors.rewards.base.AnswerFaultError for one "
                "that it cannot read; actors.environment.sample_call=false starts without this call"
            )


async def failure(call: SampleCall) -> str:
    """Return why a reward cannot score its answer, with the traceback of its own code; empty where it can."""
    patient = call.config
    config = patient.model_copy(
        update={
            "remote": patient.remote.model_copy(update={"attempts": ATTEMPTS}),
            "judge": patient.judge.model_copy(update={"attempts": ATTEMPTS}),
        }
    )
    scorer = Scorer.from_config(call.name, config)
    try:
        await scorer.scored(call.answer)
        if ":" in call.name:
            await _refuse_no_reward(scorer, replace(call.answer, text=OTHER_TEXT))
        if (of_group := GroupScorer.from_config(config)) is not None:
            await of_group.scored([replace(call.answer, reward=reward) for reward in (0.0, 1.0)])
    except TransientError as error:
        log.warning("reward_server_is_away", reward=call.name, reason=str(error))
    except RewardError as error:
        return _with_traceback(error)
    finally:
        await scorer.close()
    return ""


async def _refuse_no_reward(scorer: Scorer, answer: Answer) -> None:
    """Raise InvalidRewardError if what the reward returns is none; it may raise for such a text."""
    found: object = None
    with suppress(RewardError):
        found = await scorer.tried(answer)
    if isinstance(found, InvalidRewardError):
        raise InvalidRewardError(f"for the text {answer.text!r}, {found}")


def _with_traceback(error: BaseException) -> str:
    return str(error) if isinstance(error.__cause__, CallHangsError) else with_traceback(str(error), error)


async def _told_by_another_process(call: SampleCall) -> str:
    calls = 3 if call.config.group_reward is not None else 2
    limit_s = LOADING_S + calls * call.config.reward_timeout_s
    try:
        told = await ask_child((sys.executable, "-c", CHILD, *sys.path), pickle.dumps(call), limit_s=limit_s)
    except TimeoutError:
        return f"its process did not end within {limit_s:g} s"
    try:
        return str(json.loads(told.answer))
    except ValueError:
        return f"its process ended with status {told.status}: {told.errors[-TRACEBACK_CHARACTERS:]}"


def main() -> None:
    """Write what `failure` tells of the call on standard input, as JSON, without what the reward prints."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    call: SampleCall = pickle.load(sys.stdin.buffer)
    try:
        reason = asyncio.run(failure(call))
    except ConfigError as error:
        reason = str(error)
    print(json.dumps(reason), file=results, flush=True)
    os._exit(0)  # a call that hangs has a thread of its own
