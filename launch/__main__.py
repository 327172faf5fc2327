"""The `launch` command; `python -m launch` is the same."""

import gc
import os
import select
import signal
import sys
from pathlib import Path

from launch.process.own_packages import search_own_packages_first


def main() -> None:
    """Run the command that the process's arguments name."""
    search_own_packages_first()
    try:
        from launch.cli.main import main as run_command  # not before: a user's bus.py would be taken for ours

        try:
            run_command()
        finally:
            sys.stdout.flush()
            # The interpreter's end would search torch and transformers for garbage, which takes
            # longer than all else that a process does when it is stopped.
            gc.freeze()
    except KeyboardInterrupt:  # before the process has its own way to stop
        sys.exit(130)
    except BrokenPipeError:
        if not _reader_left(sys.stdout.fileno()):
            raise
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _reader_left(descriptor: int) -> bool:
    """Return whether nobody reads what is written there any more, as after `launch runs | head -1`."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    main()
