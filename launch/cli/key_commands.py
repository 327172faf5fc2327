"""`launch keys`: exchanges the keys of a run's roles on a secured bus, while the run goes on."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from bus.errors import ConfigError
from launch.cli import options
from launch.cli.app import app

keys = App(name="keys", help="Exchange the keys of a live run's roles on a secured bus.")
app.command(keys)
Directory = Annotated[
    Path, Parameter(name="--secure", help="Directory of credentials, as `launch bus --secure` was given it.")
]
Role = Annotated[str, Parameter(help="Role: operator, storage, learner, actor, judge or watcher.")]


@keys.command(name="rotate", usage="Usage: launch keys rotate ROLE --secure DIR --run RUN")
def rotate_command(role: Role, /, *, secure: Directory, run_name: options.RunName = "default") -> None:
    """Make another key for a role. The one before is let in, too, until `launch keys revoke`.

    It is run on the host of `launch bus`, which takes the new key over at once. Copy the role's new file over
    the old one on each host that uses it: its processes read it within seconds.
    """
    _change(secure, run_name, role, revoke=False)


@keys.command(name="revoke", usage="Usage: launch keys revoke ROLE --secure DIR --run RUN")
def revoke_command(role: Role, /, *, secure: Directory, run_name: options.RunName = "default") -> None:
    """Let in a role by its newest key alone. A role that has a single key gets another one instead of it.

    `launch bus` ends the connections of the others at once, and no process of the run acts any more on what
    they have signed. Processes with an old file come back when the newest one is copied over it.
    """
    _change(secure, run_name, role, revoke=True)


def _change(directory: Path, run: str, role: str, *, revoke: bool) -> None:
    from bus.server.secure_directory import SecureDirectory

    if not directory.is_dir():
        raise ConfigError(f"--secure {directory} is no directory: give the one of `launch bus --secure`")
    secure = SecureDirectory(directory)
    secure.refuse_unknown(run, role)
    files = secure.files(run)
    if revoke:
        files.revoke(role)
    else:
        files.rotate(role)
    done = "is the only one that is let in" if revoke else "is let in besides those before"
    print(f"The key in {files.creds(role)} {done}: copy the file to the hosts of {role}.")  # noqa: T201 - the user's terminal
