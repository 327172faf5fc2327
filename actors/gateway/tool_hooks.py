"""Functions of the user that stand between a tool call of the policy and the agent that would make it."""

from collections.abc import Callable, Sequence

from actors.policy.messages import ToolCall
from bus.errors import SluiceError
from bus.process.plugins import RAISED, load_function

ToolHook = Callable[[ToolCall], ToolCall | str]
"""A function from a tool call to the call that the agent gets, or to words that it gets in its place. It runs
on the event loop, at every call: it must not block."""


class ToolHookError(SluiceError):
    """A hook raised, or returned what is neither a call nor words."""


def load_hook(name: str | None) -> ToolHook | None:
    """Import `my_pkg.my_module:function`; raises ConfigError if it cannot be loaded."""
    return None if name is None else load_function("tool hook", name, {})


def passed(hook: ToolHook | None, calls: Sequence[ToolCall]) -> tuple[tuple[ToolCall, ...], list[str]]:
    """Return the calls that the agent gets, and the words in place of those that were denied."""
    if hook is None:
        return tuple(calls), []
    outcomes = [_outcome(hook, call) for call in calls]
    words = [outcome for outcome in outcomes if isinstance(outcome, str)]
    return tuple(outcome for outcome in outcomes if isinstance(outcome, ToolCall)), words


def _outcome(hook: ToolHook, call: ToolCall) -> ToolCall | str:
    try:
        outcome = hook(call)
    except RAISED as error:  # the user's function may raise anything
        raise ToolHookError(f"the tool hook raised {error!r} on a call of {call.name!r}") from error
    if not isinstance(outcome, ToolCall | str):
        raise ToolHookError(f"the tool hook returned {outcome!r}: return a ToolCall, or words for the agent")
    return outcome
