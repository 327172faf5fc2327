"""Tasks in the layout of Harbor, and what of them cannot be had here. A task is a directory with `task.toml`,
`instruction.md`, a Dockerfile in `environment`, and in `tests` a `test.sh` that writes its reward to
/logs/verifier/reward.txt or reward.json."""

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from bus.errors import ConfigError

TESTS, WORKSPACE = "/tests", "/workspace"
REFUSED = (
    ("environment", "gpus"), ("environment", "tpu"), ("environment", "mcp_servers"),
    ("environment", "healthcheck"), ("environment", "skills_dir"), ("agent", "user"),
    ("verifier", "user"), ("verifier", "environment"), ("verifier", "collect"),
)  # fmt: skip
"""Settings of a task that no sandbox here heeds."""
HARMLESS = frozenset(
    ("FROM", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK")
)
"""Instructions of a Dockerfile without which its files are the same."""


@dataclass(frozen=True)
class HarborTask:
    """One task."""

    directory: Path
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.directory.name

    def setting(self, table: str, name: str) -> Any:
        """Return a setting of `task.toml`, None where it is not given."""
        return self.config.get(table, {}).get(name)

    def megabytes(self, name: str) -> int | None:
        """Return the task's memory or storage in MiB, which earlier tasks say as `2G`."""
        number, told = self.setting("environment", f"{name}_mb"), self.setting("environment", name)
        if number is not None or told is None:
            return None if number is None else int(number)
        if (found := re.fullmatch(r"([\d.]+)([GMK])", str(told).strip().upper())) is None:
            raise self.refused(f"environment.{name}={told!r} is no size such as 2G")
        return max(1, int(float(found[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[found[2]]))

    @cached_property
    def instruction(self) -> str:
        return self._text(self.directory / "instruction.md")

    @cached_property
    def hidden_files(self) -> dict[str, str]:
        """Return the tests by their places in a sandbox, and the variables that they find."""
        variables = self.setting("verifier", "env") or {}
        lines = [f"export {name}={shlex.quote(str(value))}\n" for name, value in variables.items()]
        if any("${" in line for line in lines):
            raise self.refused("verifier.env takes variables of the host, which none of its tests finds here")
        tests = self.directory / "tests"
        if not (tests / "test.sh").is_file():
            raise self.refused("its directory tests has no test.sh")
        found = {f"{TESTS}/{path.relative_to(tests)}": self._text(path) for path in files_below(tests)}
        return {**found, f"{TESTS}/.variables": "".join(lines)}

    @cached_property
    def dockerfile(self) -> str:
        image, path = (
            self.setting("environment", "docker_image"),
            self.directory / "environment" / "Dockerfile",
        )
        written = self._text(path) if path.is_file() else ""
        if not (image or written):
            raise self.refused("it has neither environment/Dockerfile nor environment.docker_image")
        place = self.setting("environment", "workdir")
        variables = self.setting("environment", "env") or {}
        lines = [f"FROM {image}" if image else written]
        lines += [f"ENV {name}={shlex.quote(str(value))}" for name, value in variables.items()]
        return "\n".join([*lines, *([f"WORKDIR {place}"] if place else [])]) + "\n"

    def check(self) -> None:
        needed = [f"{table}.{name}" for table, name in REFUSED if self.setting(table, name)]
        needed += [path.name for path in (self.directory / "environment").glob("*compose*.y*ml")]
        needed += ["steps"] if self.config.get("steps") else []
        needed += (
            ["environment.os"] if str(self.setting("environment", "os") or "linux").lower() != "linux" else []
        )
        if self.setting("verifier", "environment_mode") == "separate":
            needed.append("verifier.environment_mode=separate")
        if needed:
            raise self.refused(f"it needs {', '.join(needed)}")

    def refused(self, reason: str) -> ConfigError:
        return ConfigError(f"the Harbor task {self.directory}: {reason}; leave this task out")

    def files_of_host(self) -> tuple[str, dict[str, str]]:
        """Return the directory that its Dockerfile works in, and the texts that it copies there, by their
        places in the workspace. Raises `ConfigError` for a Dockerfile that does more than that."""
        place, found = PurePosixPath("/"), {}
        for word, rest in _instructions(self.dockerfile):
            if word == "WORKDIR":
                place /= rest
            elif word in ("COPY", "ADD") and not rest.startswith(("-", "[")) and place != PurePosixPath("/"):
                for path, target in self._copied(rest.split(), place):
                    if not target.is_relative_to(place):
                        raise self.refused(
                            f"`{word} {rest}` leads out of {place}, which needs Docker or Podman"
                        )
                    found[f"{WORKSPACE}/{target.relative_to(place)}"] = self._text(path)
            elif word not in HARMLESS:
                raise self.refused(
                    f"`{word} {rest}` of its Dockerfile needs Docker or Podman, which is not here"
                )
        if len(place.parts) != 2:
            raise self.refused(f"it works in {place}; without Docker that has to be a directory such as /app")
        return str(place), found

    def _copied(self, words: list[str], place: PurePosixPath) -> Iterator[tuple[Path, PurePosixPath]]:
        *sources, last = words
        context, target = self.directory / "environment", place / last
        for source in sources:
            path = context / source.strip("/")
            if path.is_dir():
                yield from ((one, target / one.relative_to(path)) for one in files_below(path))
            else:
                into = last.endswith(("/", ".")) or len(sources) > 1
                yield path, target / path.name if into else target

    def _text(self, path: Path) -> str:
        try:
            return path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise self.refused(
                f"{path.relative_to(self.directory)} is no text that can be read ({error})"
            ) from error


def read_tasks(path: Path) -> list[HarborTask]:
    """Return the tasks of a directory, or the one that it is. Raises `ConfigError` where there is none, and
    for what no sandbox here can do."""
    found = (
        [path] if (path / "task.toml").is_file() else sorted(one.parent for one in path.glob("*/task.toml"))
    )
    if not found:
        raise ConfigError(f"--environment harbor:{path}: no task.toml is there, nor in a directory below it")
    tasks = []
    for directory in found:
        try:
            config = tomllib.loads((directory / "task.toml").read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"the Harbor task {directory}: {error}") from error
        tasks.append(HarborTask(directory, config))
        tasks[-1].check()
    return tasks


def files_below(directory: Path) -> list[Path]:
    """Return the files below a directory, always in the same order."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    lines = (line for line in dockerfile.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word.upper(), rest.strip()
