"""What a run's record names is imported and run only if this host, or a bus with credentials, allows it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.environments.build import build_environment
from actors.settings.engines import SglangEngineConfig
from bus.config import AllowConfig, BusConfig
from bus.connection.bus import Bus
from bus.errors import ConfigError
from bus.messages import RunRecord
from bus.process import plugins
from bus.process.plugins import ImportPolicy
from bus.security.credentials import load_credentials
from bus.server.nats_server import NatsServer, free_port, nats_binary
from bus.server.secure_directory import SecureDirectory
from launch.cli.app import allowed_here, run_and_own_settings
from launch.process.record_trust import _trusted, with_own_engine
from launch.process.run_connection import joined
from launch.services.actors import serve_actors
from launch.settings.run_config import RunConfig, resolve, validate

pytestmark = pytest.mark.nats
NAME = "stranger_plugin"
PYTHON = str(Path("/bin/sh"))


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in the working directory and in one of plug-ins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(plugins, "_policy", ImportPolicy())
    (tmp_path / "plugins").mkdir()
    for directory in (tmp_path, tmp_path / "plugins"):
        (directory / f"{NAME}.py").write_text("def reward(answer, label): return 1.0\n")
    yield
    sys.modules.pop(NAME, None)


def reached_at(url: str, name: str = "127.1") -> str:
    """Return another URL of a server of this host; 127.1 is the same address, and not known for it."""
    return url.replace("127.0.0.1", name)


async def define(bus: Bus, record: dict[str, Any]) -> None:
    await bus.create_keys()
    text = resolve(record).model_dump_json()
    await bus.put("run", RunRecord(name="test", config_json=text))


@pytest.fixture
async def url(bus_server: NatsServer, bus: Bus) -> AsyncIterator[str]:
    """A bus without credentials that other hosts could reach, on which a stranger has defined the run."""
    await define(bus, {"run": "test", "actors": {"environment": {"reward": f"{NAME}:reward"}}})
    return reached_at(bus_server.url)


def actor(url: str, **allow: object) -> RunConfig:
    return validate({"run": "test", "bus": {"url": url}, "allow": allow})


async def take_part(where: RunConfig, overrides: dict[str, Any] | None = None) -> RunConfig:
    """Join as an actor does, up to where it loads what the run names."""
    async with Bus.connect(where.bus, where.run, name="actors") as bus:
        config = await joined(bus, where, overrides or {}, asyncio.Event())
        assert config is not None
        config = with_own_engine(bus, config, overrides or {})
        build_environment(config.actors.environment)
        return config


async def test_module_that_a_stranger_names_is_refused_with_the_remedies(url: str):
    with pytest.raises(ConfigError, match=r"--plugins-from DIR .*--secure.* --insecure"):
        await serve_actors(actor(url), {}, asyncio.Event())
    assert NAME not in sys.modules


async def test_module_is_imported_that_this_host_names_itself(url: str):
    await take_part(actor(url), {"actors": {"environment": {"reward": f"{NAME}:reward"}}})
    assert NAME in sys.modules


@pytest.mark.parametrize("allow", [{"insecure": True}, {"plugins_from": ("plugins",)}])
async def test_module_is_imported_that_this_host_allows(url: str, allow: dict[str, Any]):
    await take_part(actor(url, **allow))
    assert NAME in sys.modules


async def test_module_is_imported_on_loopback(bus_server: NatsServer, url: str):
    await take_part(actor(bus_server.url))
    assert NAME in sys.modules


@pytest.mark.parametrize("user", ["", "me@", "me:secret@"])
async def test_module_is_refused_where_a_tunnel_listens_on_loopback(
    bus_server: NatsServer, url: str, user: str
):
    """The port is this host's, and who writes on the bus behind it is not known."""
    async with tunnel(bus_server.port) as port:
        with pytest.raises(ConfigError, match=r"others may write: .* is not seen to be a nats-server"):
            await take_part(actor(f"nats://{user}127.0.0.1:{port}"))
    assert NAME not in sys.modules


async def test_module_is_refused_on_a_bus_of_this_host_that_others_reach(tmp_path: Path):
    async with NatsServer(tmp_path / "open", host="0.0.0.0") as server:
        there = f"nats://127.0.0.1:{server.port}"
        async with Bus.connect(BusConfig(url=there), "test", name="stranger") as stranger:
            await define(stranger, {"run": "test", "actors": {"environment": {"reward": f"{NAME}:reward"}}})
        for user in ("", "me:secret@"):
            with pytest.raises(ConfigError, match="one that listens beyond loopback"):
                await take_part(actor(there.replace("//", f"//{user}")))
    assert NAME not in sys.modules


@pytest.mark.parametrize(("no_auth_user", "trusted"), [("", True), ("no_auth_user: me\n", False)])
async def test_a_password_counts_where_the_server_refuses_who_has_none(
    tmp_path: Path, no_auth_user: str, trusted: bool
):
    port = free_port("127.0.0.1")
    config = tmp_path / "nats.conf"
    users = 'authorization { users: [{ user: "me", password: "secret" }] }\n'
    config.write_text(f'listen: "0.0.0.0:{port}"\n{users}{no_auth_user}')
    process = await asyncio.create_subprocess_exec(
        nats_binary(), "-c", str(config), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        where = actor(f"nats://me:secret@127.0.0.1:{port}")
        async with Bus.connect(where.bus, where.run, name="actors") as bus:
            assert _trusted(bus, where) == trusted
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def tunnel(port: int) -> AsyncIterator[int]:
    """Pass connections on to a port, as ssh does; yields the port that it listens at."""
    running: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to, back = await asyncio.open_connection("127.0.0.1", port)
        for one, other in ((reader, back), (to, writer)):
            running.add(asyncio.create_task(copy(one, other)))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as listening:
        yield int(listening.sockets[0].getsockname()[1])
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_module_is_imported_on_a_bus_with_credentials(tmp_path: Path):
    secure = SecureDirectory(tmp_path / "keys")
    server = NatsServer(tmp_path / "nats", secure=secure)
    secure.make(["test"], reached_at(server.url))

    def config(role: str) -> BusConfig:
        path = secure.path / f"test/{role}.creds"
        return BusConfig(url=load_credentials(path).url, creds=path)

    async with server:
        async with Bus.connect(config("storage"), "test", name="storage") as bus:
            await define(bus, {"run": "test", "actors": {"environment": {"reward": f"{NAME}:reward"}}})
        await take_part(RunConfig(run="test", bus=config("actor")))
    assert NAME in sys.modules


async def test_record_cannot_widen_what_this_host_allows(bus_server: NatsServer, bus: Bus):
    await define(
        bus,
        {
            "run": "test",
            "allow": {"insecure": True, "plugins_from": [str(Path.cwd())], "engine_python": PYTHON},
            "actors": {"environment": {"reward": f"{NAME}:reward"}, "engine": {"type": "sglang"}},
        },
    )
    with pytest.raises(ConfigError, match="--plugins-from"):
        await take_part(actor(reached_at(bus_server.url)))
    (Path.cwd() / "other").mkdir()
    with pytest.raises(ConfigError, match="this host allows a run only what lies in"):
        await take_part(actor(bus_server.url, plugins_from=("other",)))
    assert NAME not in sys.modules


@pytest.mark.parametrize(
    "named",
    [{"python": PYTHON}, {"environment": {"LD_PRELOAD": "/x.so"}}, {"server": {"trust_remote_code": True}}],
)  # fmt: skip
async def test_what_engines_run_is_not_a_strangers_to_say(
    server: NatsServer, bus: Bus, named: dict[str, Any]
):
    engine = {"actors": {"engine": {"type": "sglang", **named}}}
    await define(bus, {"run": "test", **engine})
    with pytest.raises(
        ConfigError, match=rf"actors\.engine\.{next(iter(named))}=.*comes from the run's record"
    ):
        await take_part(actor(reached_at(server.url)))
    for where, own in ((actor(server.url), {}), (actor(reached_at(server.url)), engine)):
        assert isinstance((await take_part(where, own)).actors.engine, SglangEngineConfig)


async def test_interpreter_of_this_host_replaces_that_of_the_record(bus_server: NatsServer, bus: Bus):
    await define(bus, {"run": "test", "actors": {"engine": {"type": "sglang", "python": "/bin/other"}}})
    for url in (bus_server.url, reached_at(bus_server.url)):
        found = (await take_part(actor(url, engine_python=PYTHON))).actors.engine
        assert isinstance(found, SglangEngineConfig)
        assert str(found.python) == PYTHON


async def test_variables_of_the_record_do_not_reach_this_hosts_interpreter(bus_server: NatsServer, bus: Bus):
    engine = {"type": "sglang", "environment": {"PYTHONPATH": "/x"}}
    await define(bus, {"run": "test", "actors": {"engine": engine}})
    with pytest.raises(ConfigError, match="with --engine-python they are this host's"):
        await take_part(actor(bus_server.url, engine_python=PYTHON))


async def test_directory_that_is_none_is_named(url: str):
    with pytest.raises(ConfigError, match=r"--plugins-from .*nowhere is no directory"):
        await take_part(actor(url, plugins_from=("nowhere",)))


def test_flags_say_what_this_host_allows():
    layer = allowed_here([Path("a"), Path("b")], insecure=True, engine_python=Path(PYTHON))
    where, own = run_and_own_settings(layer, {})
    assert own == {}
    allowed = AllowConfig(plugins_from=("a", "b"), insecure=True, engine_python=PYTHON)
    assert where.allow == allowed
    assert allowed_here(None, insecure=False) == {}


def test_saved_settings_keep_what_is_allowed():
    config = validate({"allow": {"plugins_from": ["a", "b"], "insecure": True}})
    assert validate(json.loads(config.model_dump_json())) == config
