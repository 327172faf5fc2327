"""All exceptions that the system raises on purpose. Each type is named for what the caller can do."""

import difflib
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence

MOST_LISTED = 12
"""Problems that one error lists: the screen that shows it has room for no more."""
SHOWN_CHARACTERS = 150
"""What a screen shows of a long failure: so much of its beginning, and of its end, where tracebacks say what
was wrong."""
TRACEBACK_CHARACTERS = 4000
"""Characters of a traceback that an error shows, from its end."""


def in_short(failure: str) -> str:
    """Return a failure on one line, without the middle of a long one."""
    line = " ".join(failure.split())
    if len(line) <= 2 * SHOWN_CHARACTERS:
        return line
    return f"{line[:SHOWN_CHARACTERS]} ... {line[-SHOWN_CHARACTERS:]}"


def listed(problems: Sequence[str], most: int = MOST_LISTED) -> str:
    """Return problems as a list for people, a line each, and how many more there are than `most`."""
    lines = [f"- {problem}" for problem in problems[:most]]
    more = [f"- and {len(problems) - most} more"] if len(problems) > most else []
    return "\n".join([*lines, *more])


def nearest(name: object, names: Iterable[str]) -> str:
    """Return the question whether the most similar of `names` was meant; empty where none is similar."""
    match = difflib.get_close_matches(str(name), list(names), n=1, cutoff=0.5)
    return f"did you mean {match[0]!r}? " if match else ""


def with_traceback(said: str, error: BaseException) -> str:
    """Return what is said of an error, with the traceback of what caused it unless that is Sluice's own."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, SluiceError) or cause.__traceback__ is None:
        return said
    lines = "".join(traceback.format_exception(cause, chain=False)).rstrip()
    return f"{said}\n{lines[-TRACEBACK_CHARACTERS:]}"


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that a group holds, those of its groups too; an error that is no group by itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


class SluiceError(Exception):
    """Root of all errors raised on purpose; its message holds the values and the remedy."""


class ConfigError(SluiceError, ValueError):
    """A setting or file of the user cannot work: report it without a traceback and exit with status 2."""


class NoActorsError(ConfigError):
    """The actors of a run have ended by what no restart mends, and no other comes: end, too."""


class PolicyMismatchError(ConfigError):
    """Engines go on sampling from another policy than the learner has: mend their settings, then resume."""


class SchemaError(SluiceError, ValueError):
    """Bytes on the bus are no message that this build understands or may act on: a retry cannot help."""

    def __init__(self, reason: str = "", *, kind: str = "unreadable", actor: str = "") -> None:
        super().__init__(reason)
        self.kind = kind
        """Word by which such messages are counted; part of a subject."""
        self.actor = actor
        """Actor that made the message, if the message says so."""


class UnsignedError(SchemaError):
    """Nobody who may write a record has signed it: it is set aside, and its owner writes it again."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, kind="unsigned")


class UnknownKeyError(UnsignedError):
    """A record is signed with a key that no role of the run has, as far as this process knows."""


class HandBackError(SluiceError):
    """This process will not do the work of a message that is valid: another process may have it."""


class BusError(SluiceError):
    """The bus refused, is missing, or did not answer in time. `refusal` is what the process that was asked
    says where it refuses; empty for all other errors."""

    def __init__(self, *args: object, refusal: str = "") -> None:
        super().__init__(*args)
        self.refusal = refusal


class BusAwayError(BusError):
    """The bus is away, or nobody there does what was asked for: start this process again later."""


class DamagedError(BusError):
    """Bytes differ from what was announced: do not use their source again."""


class UnreadableGroupsError(SluiceError):
    """Stored groups are damaged or were retired: a retry cannot help, others must take their place."""

    def __init__(self, reason: str = "", lease_ids: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.lease_ids = lease_ids
        """Leases of the groups."""


class FencedError(SluiceError):
    """Another process took over this role: stop at once and write nothing more."""


class WorldError(SluiceError):
    """Another process of the learner's world is gone: this one cannot go on alone."""


class EngineError(SluiceError):
    """An inference engine failed or returned something that cannot be a generation."""


class RequestRefusedError(EngineError):
    """An engine that is well can never serve this request: it does not fit, or its id is in use."""


class ContextFullError(RequestRefusedError):
    """A prompt leaves no room for an answer in the longest context of any engine."""

    def __init__(self, tokens: int, longest: int) -> None:
        super().__init__(
            f"a prompt of {tokens} tokens leaves no room for an answer in a context of {longest}: shorten it"
        )
        self.tokens = tokens
        """Tokens of the prompt."""
        self.longest = longest
        """Most tokens of prompt and answer together."""


class WeightsKeptError(EngineError):
    """New weights could not be had. The engine is well and goes on with the weights it has."""


class EngineLostError(EngineError):
    """No engine is left: this process cannot go on, and another one may have its work."""


class EngineNodeLostError(EngineError):
    """An engine of several nodes is lost: its actors can begin anew once all nodes are there."""


class TrainingError(SluiceError):
    """Training cannot go on from where it is: an older checkpoint or other settings are needed."""


class StorageError(SluiceError):
    """Data on disk is missing, torn, or not what its manifest says."""


class DiskFullError(StorageError):
    """A disk has no room: start this process again once it has."""


class LostDataError(StorageError):
    """Data on disk is damaged or was retired: reading it again is useless."""


LOGIN_REFUSED = "authorization violation"
"""nats-py, while it connects, raises a plain `Error` with the sentence of the server."""
RANK_LOST = "gloo/"
"""gloo raises a plain `RuntimeError`, whose text begins with the path of the source that raised it."""
FILE_NOT_WRITTEN = ("inline_container.cc", "basic_ios::clear")
"""torch says one of them when it writes a file by itself and cannot, of a small one the latter; it does not
say why."""
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")
"""How libraries in Rust, and texts of Python's own, give the number of the system's error."""


def tells(error: BaseException, part: str) -> bool:
    """Return whether the text of an error has this part, in whatever case. SGLang says which adapter it lacks
    by naming it in a sentence, with the status of any bad request."""
    return part.lower() in str(error).lower()


def system_errors(error: BaseException) -> list[int]:
    """Return the numbers of the system's errors that the text of an error gives."""
    return [int(one or other) for one, other in _SYSTEM_ERROR.findall(str(error))]
