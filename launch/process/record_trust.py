"""What a process does for a run only if this host, or a bus with credentials, stands for it. The run's record
names modules to import and an interpreter to run. On a bus without credentials everybody who reaches it can
write that record."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from actors.settings.engines import SglangEngineConfig
from bus.config import BusConfig, without_credentials
from bus.connection.bus import Bus
from bus.errors import ConfigError
from bus.process.plugins import ImportPolicy, restrict_imports
from bus.server.local_server import demands_credentials, reaches_own_server
from bus.server.nats_server import is_loopback
from launch.settings.run_config import RunConfig, validate

RUNS_CODE = ("python", "environment", "server")
"""Settings of an SGLang server that decide which code it runs."""


def restrict_to_own(bus: Bus, config: RunConfig, overrides: Mapping[str, Any]) -> None:
    """Have this process import for the run only what this host allows; `overrides` are its own settings."""
    refusal = ""
    if not _trusted(bus, config):
        refusal = (
            f"comes from the run's record, which {_writers(bus, config)}: give --plugins-from DIR with what "
            "a run may import here, use a bus with credentials (`launch bus --secure`), or give --insecure "
            "on a network of your own"
        )
    directories = tuple(path.absolute() for path in config.allow.plugins_from)
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(f"--plugins-from {directory} is no directory: make it, or leave it out")
    restrict_imports(ImportPolicy(directories, refusal, frozenset(_texts(overrides))))


def with_own_engine(bus: Bus, config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with the interpreter that this host names for engines. Raises `ConfigError`
    when the run's record decides what they run and must not."""
    engine, python = config.actors.engine.servers, config.allow.engine_python
    if not config.actors.engine.starts_servers:
        return config
    own = validate(overrides).actors.engine
    if python is not None:
        _refuse_of_record(engine, own, ("environment",), "with --engine-python they are this host's")
        engine = engine.model_copy(update={"python": python})
    if not _trusted(bus, config):
        named = RUNS_CODE if python is None else RUNS_CODE[1:]
        _refuse_of_record(engine, own, named, f"the run's record {_writers(bus, config)}")
    return config.model_copy(update={"actors": config.actors.model_copy(update={"engine": engine})})


def _refuse_of_record(engine: SglangEngineConfig, own: object, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        value = getattr(engine, name)
        if value and value != getattr(own, name, None):
            raise ConfigError(
                f"actors.engine.{name}={value!r} comes from the run's record, and {reason}: give "
                f"{'--engine-python PATH' if name == 'python' else f'--actors.engine.{name}'} on this host, "
                "use a bus with credentials, or give --insecure on a network of your own"
            )


def unsigned_remark(bus: BusConfig) -> str:
    """Return what a password in the bus's URL does not protect from; empty where there is none."""
    if bus.creds is not None or not urlsplit(bus.url).username:
        return ""
    return (
        "Records are not signed on a bus with a password: whoever has it may write what the run's definition "
        "names, and so run programs on the hosts of learner and actors. `launch bus --secure` has roles sign."
    )


def _trusted(bus: Bus, config: RunConfig) -> bool:
    """Return whether nobody writes the run's record but who may decide what runs on this host."""
    url = bus.client.connected_url
    if bus.secured or config.allow.insecure or url is None:  # a secured bus: storage has signed the record
        return bus.secured or config.allow.insecure
    if url.username and demands_credentials(bus.client):
        return True
    return is_loopback(url.hostname or "") and reaches_own_server(bus.client)


def _writers(bus: Bus, config: RunConfig) -> str:
    url, where = bus.client.connected_url, without_credentials(config.bus.url)
    if url is not None and is_loopback(url.hostname or ""):
        return (
            f"others may write: {where} is not seen to be a nats-server that this host alone reaches (it may "
            "be a tunnel, another user's server, or one that listens beyond loopback)"
        )
    return f"everybody who reaches {where} can write"


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value
