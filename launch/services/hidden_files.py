"""Which files of this host tell a run's labels or open something: no program of an agent sees them."""

import os
import pwd
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

from pydantic import BaseModel

from bus.errors import ConfigError
from bus.server.local_server import server_directories
from launch.recipes.recipe import recipes_directory, user_cache
from launch.settings.run_config import RunConfig, policy_config
from storage.disk.run_directory import run_directories
from storage.prompt_files.hub_data import is_hub_data
from storage.prompt_files.rows import files_of

OF_HOME = (
    ".aws", ".azure", ".bash_history", ".claude/.credentials.json", ".codex/auth.json", ".config/gcloud",
    ".config/gh", ".config/nats", ".docker", ".git-credentials", ".gnupg", ".huggingface", ".kaggle", ".kube",
    ".local/share/keyrings", ".mlflow", ".netrc", ".npmrc", ".pypirc", ".python_history", ".ssh",
    ".zsh_history",
)  # fmt: skip
"""Where programs of a user keep credentials, in the user's home directory."""
OF_HOST = ("/etc/gshadow", "/etc/krb5.keytab", "/etc/shadow", "/etc/ssh", "/run/secrets")
"""Where a host keeps credentials, those of containers included; an actor that is root could read them."""
HUB_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH")
"""Environment variables that name places of the Hugging Face hub's client."""


def hidden_files(config: RunConfig) -> Iterator[Path]:
    """Yield the files and directories that an agent's programs on this host must not see. They are all runs,
    streams of buses, files with labels, caches of data sets, and credentials. Not all of them need exist on
    this host."""
    yield from _runs(config)
    yield from server_directories()
    for one in (config, *(policy_config(config, name) for name in config.policies)):
        yield from _credentials(one)
        for path in _paths([one.data, one.evaluation, one.warmup]):
            yield from _rows(path)
    archive = config.replay.archive
    if archive is not None and "://" not in archive:
        yield Path(archive)
    yield from _caches()
    yield from (home / name for home in _homes() for name in OF_HOME)
    yield from map(Path, OF_HOST)
    if (scratch := Path(gettempdir())) != Path("/tmp") and not _is_needed(scratch):  # /tmp is covered
        yield scratch


def _runs(config: RunConfig) -> Iterator[Path]:
    yield config.directory / config.run
    if _is_needed(config.directory):
        yield from run_directories(config.directory)
    else:
        yield config.directory


def _is_needed(directory: Path) -> bool:
    here = (Path.cwd(), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve())
    return any(path.is_relative_to(directory.resolve()) for path in here)


def _paths(value: object) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    elif isinstance(value, BaseModel):
        yield from _paths([each for _, each in value])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _paths(each)


def _rows(path: Path) -> Iterator[Path]:
    """Yield the files of rows that a setting names, which may be a slice or a split in a directory."""
    if is_hub_data(path):
        return
    yield Path(str(path).partition("@[")[0])
    with suppress(ConfigError, OSError):  # another host has them, or another user
        yield from files_of(path)


def _caches() -> Iterator[Path]:
    with suppress(RuntimeError):  # this user has no home, and no caches there
        yield recipes_directory()
        yield user_cache() / "huggingface"
    yield from (Path(os.environ[name]).expanduser() for name in HUB_VARIABLES if os.environ.get(name))


def _homes() -> Iterator[Path]:
    """Yield the home directories of this user: HOME, and that of its account, if it has one."""
    if home := os.environ.get("HOME"):
        yield Path(home)
    with suppress(KeyError):
        yield Path(pwd.getpwuid(os.geteuid()).pw_dir)


def _credentials(config: RunConfig) -> Iterator[Path]:
    """Yield the credentials in use, with those that lie beside them, and the gateway's key.
    `launch bus --secure DIR` makes DIR/RUN/ROLE.creds, and DIR/bus.key."""
    if (creds := config.bus.creds) is not None:
        beside = creds.absolute().parent
        yield creds
        yield from (*beside.glob("*.creds"), *beside.glob("*.key"))
        if (beside.parent / "bus.key").exists():
            yield beside.parent
    for environment in config.actors.by_name.values():
        yield from _paths(getattr(environment, "gateway", None))
