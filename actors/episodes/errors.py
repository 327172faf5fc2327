"""Errors of what surrounds the policy: a rollout that raises one has no episode."""

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
