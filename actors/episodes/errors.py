"""Errors of what surrounds the policy: a rollout that raises one has no episode."""

import errno
from collections import deque
from math import inf, isfinite
from socket import gaierror

from bus.errors import SluiceError


class EpisodeError(SluiceError):
    """An environment failed: this rollout has no episode."""


def raised_by_environment(error: BaseException) -> BaseException | None:
    """Return what an environment's own code raised, whose traceback says where; None for other failures."""
    if isinstance(error, EpisodeError):
        return error.__cause__
    return None if isinstance(error, SluiceError) else error


class ToolError(SluiceError):
    """What a tool depends on failed, through no fault of the model: this rollout has no reward."""


class ToolFailedError(ToolError):
    """A call of a tool failed, which its arguments may have caused: where others work, the model reads so."""


LATEST = 100
"""Uses among which one must have worked, so that a failure is the policy's."""
REWARD_FAULT = "reward_fault"
"""Field of a trajectory's metadata that says how the policy kept its episode from being scored."""
LONGEST_FAULT = 500
FAULT_FRACTION = "rollout/reward_fault_fraction"
"""Metric of an episode: 1 where it has the lowest reward since it could not be scored, else 0."""
AWAY_OR_FULL = (ConnectionError, MemoryError, TimeoutError, gaierror)
NUMBERS = frozenset((
    errno.EAGAIN, errno.EDQUOT, errno.EHOSTUNREACH, errno.EIO, errno.EMFILE, errno.ENETUNREACH, errno.ENFILE,
    errno.ENOMEM, errno.ENOSPC,
))  # fmt: skip
"""What a host says by an OSError that has nothing left, such as disk or descriptors, or reaches nobody."""


def is_of_host(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came of, says that a server is away or a host has nothing left.
    Others, such as that of a file that is not there, may come of a name that the policy wrote."""
    while error is not None:
        if isinstance(error, AWAY_OR_FULL) or (isinstance(error, OSError) and error.errno in NUMBERS):
            return True
        if isinstance(error, BaseExceptionGroup):
            return any(map(is_of_host, error.exceptions))
        error = error.__cause__ or error.__context__
    return False


class LatestUses:
    """Notes which of the latest `LATEST` uses of something worked, such as a tool or an agent's program.

    Where one did, the thing is not broken, and a use that fails is the policy's doing. Were such an episode
    left out of training, the policy could learn to make it fail in place of a wrong answer. Where none did,
    a failure says nothing about the policy."""

    def __init__(self) -> None:
        self._rewards: deque[float | None] = deque(maxlen=LATEST)
        """Rewards of the uses, infinite where they have none; None for uses that failed."""

    def note(self, *, worked: bool, reward: float = inf) -> None:
        """Note how a use ended, and the least reward that it gave."""
        self._rewards.append(reward if worked else None)

    @property
    def work(self) -> bool:
        return any(reward is not None for reward in self._rewards)

    def lowest(self, setting: float | None) -> float | None:
        """Return the setting, or the least reward of the latest uses where that is less: no failure may be
        worth more than what is wrong. None where the setting is none."""
        if setting is None:
            return None
        return min([setting, *(one for one in self._rewards if one is not None and isfinite(one))])
