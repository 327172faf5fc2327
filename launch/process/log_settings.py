"""How a process writes its log: the level, and lines for a human or JSON for a collector."""

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, TextIO, cast

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
FAILED = "process_failed"
"""Event of JSON logs with the error that a process ends with."""


def configure_logging(level: str = "info", form: LogFormat = "text", process: str = "") -> None:
    """Log each event as one line on stderr.

    Args:
        level: events below it are left out.
        form: `json` writes an object a line, also for what libraries log, warnings, and an error that nobody
            expected. It has `timestamp` (UTC), `level`, `event`, the values of the event, and who wrote it:
            `process`, `pid`, and `rank` of a learner of several.
        process: the name in JSON lines."""
    import structlog  # slow to import, and --help logs nothing

    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=_text_processors() if form == "text" else _json_processors(process),
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # looked up at each event: a live view puts its own in place of stderr
        logger_factory=lambda *_: structlog.PrintLogger(cast(TextIO, UnbrokenStream(sys.stderr))),
    )
    logging.getLogger("asyncio").addFilter(_is_of_use)
    if form == "json":
        _log_libraries_alike(process)
        sys.excepthook = _log_crash


def _is_of_use(record: logging.LogRecord) -> bool:
    """Return whether asyncio's line is one for a user: the end of each connection with TLS writes another."""
    return "eof_received()" not in record.getMessage()


class UnbrokenStream:
    """A stream of log lines whose full disk ends no process: what has no room there waits, or is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write as far as there is room. Raises `OSError` for any other failure."""
        with _room_or_nothing():
            self._stream.write(text)

    def flush(self) -> None:
        """Flush as far as there is room. Raises `OSError` for any other failure."""
        with _room_or_nothing():
            self._stream.flush()


@contextmanager
def _room_or_nothing() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # other screens say that the disk is full
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def logs_json() -> bool:
    structlog: Any = sys.modules.get("structlog")
    if structlog is None or not structlog.is_configured():
        return False
    return isinstance(structlog.get_config()["processors"][-1], structlog.processors.JSONRenderer)


def log_failure(message: str, status: int) -> None:
    import structlog

    structlog.get_logger().error(FAILED, reason=message, status=status)


def _text_processors() -> list[Any]:
    import structlog

    return [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
        # Rich's tracebacks, its default, take 20 ms each and show what variables hold: prompts, tokens, keys.
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        ),
    ]


def _json_processors(process: str) -> list[Any]:
    import structlog

    return [*_common_processors(process), structlog.processors.JSONRenderer(default=str)]


def _common_processors(process: str) -> list[Any]:
    import structlog

    who = {"process": process, "pid": os.getpid()}
    if "RANK" in os.environ:
        who["rank"] = int(os.environ["RANK"])

    def add_who(_: object, __: str, event: dict[str, Any]) -> dict[str, Any]:
        head = {name: event.pop(name) for name in ("timestamp", "level", "event") if name in event}
        return head | who | event

    return [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        # What variables hold, such as prompts and keys, is no matter of a collector's.
        structlog.processors.ExceptionRenderer(
            structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        ),
        add_who,
    ]


def _log_libraries_alike(process: str) -> None:
    """Write what libraries log from `warning` on, and Python's warnings, as JSON too."""
    import structlog

    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_common_processors(process),
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(capture=True)


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log an error that ends the process without having been made for the user."""
    import structlog

    structlog.get_logger().critical("process_crashed", exc_info=(kind, error, trace))
