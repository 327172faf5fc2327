"""Environments of other packages as tasks: what `--environment KIND:NAME` stands for. Each is installed into
an environment of its own, which is kept. A process there makes the prompts, and one plays many episodes at a
time; Sluice knows it as a long-lived agent."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from pydantic import Field, JsonValue, ValidationError

from bus.config import Config
from bus.errors import ConfigError, nearest
from launch.recipes.recipe import user_cache
from launch.settings.run_config import Layer

MAKE_TIMEOUT_S, INSTALL_TIMEOUT_S = 300.0, 3600.0
SHOWN_LINES = 12
"""Last lines of a program's output that an error shows."""


def variables_of(place: Path) -> dict[str, str]:
    """Return the environment variables by which what packages fetch lies in `place`, beside them."""
    cache = str(place / "cache")
    return {"XDG_CACHE_HOME": cache, "HF_HOME": f"{cache}/huggingface", "NLTK_DATA": f"{cache}/nltk_data"}


@dataclass(frozen=True)
class VirtualEnvironment:
    """A Python with packages of its own."""

    place: Path
    packages: tuple[str, ...]
    """What pip installs: packages, directories, URLs and options."""
    base: str = sys.executable

    @property
    def python(self) -> Path:
        return self.place / "venv" / "bin" / "python"

    def make(self) -> None:
        """Make the environment, unless it is whole. Raises `ConfigError` for what cannot be installed."""
        complete = self.place / "installed"
        if complete.exists():
            return
        for directory in ("venv", "cache/nltk_data"):
            (self.place / directory).mkdir(parents=True, exist_ok=True)
        make = [self.base, "-m", "venv", "--clear", "--without-pip", str(self.place / "venv")]
        self.run(make, MAKE_TIMEOUT_S, f"making {self.place / 'venv'}")
        if self.packages:
            own = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
            pip = [*own, "--python", str(self.python)]
            install = [*pip, "install", "--quiet", *self.packages]
            self.run(install, INSTALL_TIMEOUT_S, f"installing {' '.join(self.packages)}")
        complete.touch()

    def run(self, command: Sequence[str], timeout_s: float, what: str) -> None:
        """Run a program to its end, which is `what` in words. Raises `ConfigError` with its last lines where
        it fails or takes too long."""
        from bus.process.work_progress import long_work  # not for help

        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        try:
            with long_work(what):
                done = subprocess.run(
                    command, check=False, text=True, timeout=timeout_s,
                    env={**inherited, **variables_of(self.place)},
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
        except FileNotFoundError as error:
            raise ConfigError(f"{what}: there is no program {command[0]!r}") from error
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"{what} took longer than {timeout_s:g} s") from error
        if done.returncode:
            last = "\n".join(done.stdout.strip().splitlines()[-SHOWN_LINES:])
            raise ConfigError(f"{what} failed, status {done.returncode}:\n{last}")


HUB = "https://hub.primeintellect.ai/{}/simple/"
"""Package index of an owner on the Environments Hub."""
ADAPTERS = Path(__file__).with_name("adapters")
PROCESS = ADAPTERS / "adapter_process.py"
ROWS_TIMEOUT_S = 3600.0
REASONING_GYM, HARBOR = "reasoning_gym", "harbor"


@dataclass(frozen=True)
class Kind:
    """How environments of one library are had."""

    packages: Callable[[str], tuple[str, ...]]
    """Function from the name of an environment to what pip installs for it."""
    about: str
    """What stands behind the colon, for errors."""
    network: Literal["gateway", "host"] = "gateway"
    """What the process reaches while it plays; all may reach the network while rows are made."""


def _of_verifiers(name: str) -> tuple[str, ...]:
    """Return what pip gets for `package`, `owner/name` or `owner/name@version`; `:module` is left out."""
    package = name.partition(":")[0]
    of_hub = re.fullmatch(r"([\w-]+)/([\w.-]+)(?:@([\w.+-]+))?", package)
    if of_hub is None:
        return (package,)
    owner, found, version = of_hub.groups()
    return (f"{found}=={version}" if version else found, f"--extra-index-url={HUB.format(owner)}")


KINDS: Mapping[str, Kind] = {
    "gymnasium": Kind(lambda _: ("gymnasium[toy-text]>=1,<2",), "the id of an environment, as FrozenLake-v1"),
    "nemo_gym": Kind(lambda _: (), "the URL of a resources server, with the setting data", "host"),
    "openenv": Kind(lambda _: ("openenv>=0.10,<0.11",), "the URL of a server", "host"),
    "textarena": Kind(lambda _: ("textarena>=0.7.4,<0.8",), "the id of a game, as GuessTheNumber-v0"),
    "verifiers": Kind(
        _of_verifiers, "a package with an environment, owner/name of the hub, or package:module"
    ),
}
"""Each kind by its name, whose adapter is `adapters/NAME_adapter.py`."""


class EnvironmentFile(Config):
    """What a file for `--environment` says."""

    source: str
    """Environment as `KIND:NAME`."""
    packages: tuple[str, ...] = ()
    """What pip installs besides the packages of the kind, such as `verifiers==0.1.14`, a directory, a URL of
    git, or an option such as `--extra-index-url=https://host/simple`."""
    python: str = sys.executable
    """Interpreter whose version the packages get, such as `/usr/bin/python3.12`."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the environment itself."""
    prompts: int = Field(2000, ge=1)
    """Most prompts to train on."""
    heldout: int = Field(100, ge=1)
    """Most held-out prompts."""
    episodes_at_once: int = Field(64, ge=1, le=1024)
    """Episodes that one process of the environment plays at a time."""


@dataclass(frozen=True)
class ExternalEnvironment:
    """An environment of another package."""

    file: EnvironmentFile

    @property
    def kind(self) -> str:
        return self.file.source.partition(":")[0]

    @property
    def name(self) -> str:
        return self.file.source.partition(":")[2]

    @property
    def settings(self) -> Layer:
        """Return the run's settings; what they name is there after `prepare`."""
        if self.kind == REASONING_GYM:
            one_answer = {"type": "single_turn", "reward": REASONING_GYM}
            return {"data": {"task": f"{REASONING_GYM}/{self.name}"}, "actors": {"environment": one_answer}}
        command = [*self._command(), "play", str(self.file.episodes_at_once)]
        environment: dict[str, Any] = {
            "type": "agent",
            "command": shlex.join(command),
            "long_lived": True,
            "reward": "posted",
            "program_owns_reward": True,
            "variables": variables_of(self.place),
            "isolation": {"network": KINDS[self.kind].network, "writable": [str(self.place / "cache")]},
        }
        files = {name: self._rows / f"{name}.jsonl" for name in ("prompts", "heldout")}
        return {"data": files, "actors": {"environment": environment}}

    def prepare(self) -> None:
        """Install packages and write prompts, unless done before. Raises `ConfigError` for what cannot be."""
        if self.kind == REASONING_GYM:
            return  # the package is one of Sluice's own, and the prompts are a task
        from storage.disk.atomic_files import one_at_a_time  # not for help

        with one_at_a_time(self.place, timeout_s=ROWS_TIMEOUT_S):
            self._virtual_environment.make()
            if not self._rows.is_dir():
                self._write_rows()

    @property
    def place(self) -> Path:
        """Return the directory in which its packages, caches and prompts are kept, with those of other names
        that need the same packages."""
        kept = f"{self.kind}-{digest_of([*self._packages, self.file.python, sys.version])}"
        return user_cache() / "sluice" / "environments" / kept

    @property
    def _packages(self) -> tuple[str, ...]:
        return (*KINDS[self.kind].packages(self.name), *self.file.packages)

    @property
    def _virtual_environment(self) -> VirtualEnvironment:
        return VirtualEnvironment(self.place, self._packages, self.file.python)

    @property
    def _rows(self) -> Path:
        asked = [self.name, self.file.settings, self.file.prompts, self.file.heldout]
        code = [file.read_text() for file in (PROCESS, self._adapter)]
        slug = re.sub(r"[^A-Za-z0-9.-]+", "-", self.name)[-60:]
        return self.place / f"{slug}-{digest_of([asked, code])}"

    @property
    def _adapter(self) -> Path:
        return ADAPTERS / f"{self.kind}_adapter.py"

    def _command(self) -> list[str]:
        python = self._virtual_environment.python
        settings = json.dumps(self.file.settings)
        return [str(python), str(PROCESS), str(self._adapter), self.name, settings]

    def _write_rows(self) -> None:
        counts = [str(self.file.prompts), str(self.file.heldout)]
        with TemporaryDirectory(dir=self.place, prefix="rows-new-") as scratch:
            command = [*self._command(), "rows", *counts, scratch]
            what = f"writing the prompts of {self.file.source}"
            self._virtual_environment.run(command, ROWS_TIMEOUT_S, what)
            for name in ("prompts", "heldout"):
                if not (Path(scratch) / f"{name}.jsonl").stat().st_size:
                    raise ConfigError(f"{self.file.source} has no {name}: it gave no row for them")
            Path(scratch).rename(self._rows)
            Path(scratch).mkdir()  # which the end of the block removes


def external_environment(named: str) -> ExternalEnvironment:
    """Return what `--environment` names: `KIND:NAME`, or a TOML file that says more. Raises `ConfigError` for
    a kind that is none, and for a file that is wrong."""
    given: dict[str, Any] = {"source": named}
    if named.endswith(".toml"):
        try:
            given = tomllib.loads(Path(named).read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"--environment {named}: {error}") from error
    try:
        file = EnvironmentFile.model_validate(given)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"--environment {named}: {'; '.join(problems)}") from error
    kind, colon, name = file.source.partition(":")
    own = {REASONING_GYM: "the name of a data set", HARBOR: "a directory of tasks"}
    kinds = {**{known: one.about for known, one in KINDS.items()}, **own}
    if kind not in kinds:
        raise ConfigError(
            f"--environment {named}: no kind {kind!r}: {nearest(kind, kinds)}write KIND:NAME, with one of "
            f"{', '.join(sorted(kinds))}; a file of settings ends with .toml"
        )
    if not (colon and name):
        raise ConfigError(f"--environment {named}: write {kind}:NAME, where NAME is {kinds[kind]}")
    if kind == HARBOR:
        from launch.external_environments.harbor import HarborEnvironment  # imports this module, too

        return HarborEnvironment(file)
    return ExternalEnvironment(file)


def digest_of(what: Any) -> str:
    """Return what tells apart values of JSON, in a name."""
    return blake2b(json.dumps(what).encode(), digest_size=6).hexdigest()
