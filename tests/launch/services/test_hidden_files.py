"""A program of an agent finds no label and no credential of its host, wherever it looks."""

import asyncio
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

import actors.service
from actors.programs import hidden
from actors.programs.runner import Program, ProgramRunner
from actors.settings.agents import IsolationConfig
from bus.connection.bus import Bus
from bus.messages import RunRecord
from bus.server.nats_server import NatsServer, free_port, nats_binary
from bus.server.secure_directory import SecureDirectory
from launch.services.actors import serve_actors
from launch.services.hidden_files import hidden_files
from launch.settings.run_config import RunConfig, validate

SECRET = "SECRET-84120"
LATER = (
    "hub/hub/datasets--late/blobs/1", "demonstrations.jsonl", "disk/other/replay/0", "part/0", "mixed.jsonl",
    "cache/sluice/recipes/sums/prompts.jsonl",
)  # fmt: skip
SECRETS = (
    "runs/test/ledger", "runs/other/ledger", "runs/bus/jetstream/1.blk", "held.jsonl",
    "split/data/train-0-of-1.jsonl", "set.jsonl", "archive/0", "hub/token", "hub/hub/datasets--a--b/blobs/1",
    "token", "datasets/1", "home/.ssh/id_ed25519", "home/.netrc", "home/.aws/credentials", *LATER,
)  # fmt: skip
"""Files with what no program may find, of which the last ones are written after the actor has begun."""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(hidden, "_hidden", set())
    places = {
        "HOME": "home", "HF_HOME": "hub", "HF_TOKEN_PATH": "token", "HF_DATASETS_CACHE": "datasets",
        "XDG_CACHE_HOME": "cache",
    }  # fmt: skip
    for name, place in places.items():
        monkeypatch.setenv(name, str(tmp_path / place))
    (tmp_path / "disk/other").mkdir(parents=True)
    (tmp_path / "part").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/linked").symlink_to(tmp_path / "disk/other")
    (tmp_path / "runs/test").mkdir()
    (tmp_path / "runs/test/replay").symlink_to(tmp_path / "part")
    for name in sorted({*SECRETS} - {*LATER}):
        write(tmp_path / name)
    write(tmp_path / "project/readme")
    return tmp_path


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SECRET)


def run_of(host: Path, url: str) -> RunConfig:
    """Return a run whose agents may read all of the host's files, but for what is hidden."""
    environment = {
        "type": "agent", "command": "true", "reward": "exact", "isolation": {"readable": [host]},
    }  # fmt: skip
    sources = [
        {"name": "a", "prompts": host / "mixed.jsonl@[0:9]"}, {"name": "b", "prompts": host / "split/train"},
        {"name": "c", "prompts": "hf://a/b/train"},
    ]  # fmt: skip
    return validate({
        "run": "test", "directory": host / "runs", "bus": {"url": url},
        "actors": {"environment": environment},
        "data": {"sources": sources, "heldout": host / "held.jsonl"},
        "warmup": {"demonstrations": host / "demonstrations.jsonl"},
        "evaluation": {"sets": [{"name": "s", "prompts": host / "set.jsonl"}]},
        "replay": {"archive": str(host / "archive")},
    })  # fmt: skip


async def read_by_a_program(host: Path, *places: Path) -> set[str]:
    """Return the files of these places that a program can read, but for empty ones."""
    runner = ProgramRunner(IsolationConfig(readable=(host,)))
    try:
        return await found_by(runner, ".", *places)
    finally:
        await runner.close()


async def found_by(runner: ProgramRunner, pattern: str, *places: Path) -> set[str]:
    """Return the files of these places in which a program finds a pattern."""
    with runner.directory() as directory:
        program = Program(
            command=["grep", "-rl", pattern, *map(str, places)], variables={"PATH": os.environ["PATH"]},
            directory=directory,
        )  # fmt: skip
        ended = await runner.run(program, timeout_s=20, most_output_bytes=1 << 16)
    return {*ended.output.splitlines()}


@pytest.mark.nats
async def test_program_of_an_actor_finds_no_label_and_no_key(
    host: Path, server: NatsServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    found: set[str] = set()

    async def act(*given: object) -> None:
        for name in LATER:
            write(host / name)
        write(server.directory / "jetstream/block")
        found.update(await found_by(given[2]._runner, SECRET, host, server.directory))

    config = run_of(host, server.url)
    await bus.put("run", RunRecord(name="test", config_json=config.model_dump_json()))
    monkeypatch.setattr(actors.service, "run_actors", act)
    await serve_actors(config, {}, asyncio.Event())
    assert found == {str(host / "project/readme")}


@pytest.mark.nats
async def test_program_finds_no_key_and_no_stream_of_a_server_of_this_host(host: Path):
    """`launch bus --secure` with directories of its own, and a server that somebody else has started."""
    keys = SecureDirectory(host / "keys")
    keys.make(["test"], "nats://here:4222")
    write(host / "streams/block")
    command = (nats_binary(), "-js", "-sd", str(host / "streams"), "-p", str(free_port("127.0.0.1")))
    async with NatsServer(host / "bus", secure=keys):
        other = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        hidden.hide(hidden_files(validate({})))
        other.kill()
        await other.wait()
    assert await read_by_a_program(host, host / "keys", host / "bus", host / "streams") == set()


async def test_program_finds_no_key_of_any_role_or_run(host: Path):
    SecureDirectory(host / "keys").make(["test", "other"], "nats://here:4222")
    (host / "copied").mkdir()
    for role in ("actor", "operator"):
        (host / f"copied/{role}.creds").write_bytes((host / f"keys/test/{role}.creds").read_bytes())
    (host / "copied/alone").write_bytes((host / "copied/actor.creds").read_bytes())
    write(host / "copied/readme")
    write(host / "gateway.key")
    gateway = {"certificate": host / "gateway.pem", "certificate_key": host / "gateway.key"}
    environment = {"type": "agent", "command": "true", "reward": "exact", "gateway": gateway}
    for creds in ("keys/test/actor.creds", "copied/alone"):
        where = {"bus": {"creds": host / creds}, "actors": {"environment": environment}}
        hidden.hide(hidden_files(validate(where)))
    there = await read_by_a_program(host, host / "keys", host / "copied", host / "gateway.key")
    assert there == {str(host / "copied/readme")}


def test_keys_in_the_home_of_the_account_are_hidden_whatever_the_variable_says(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("HOME", "/srv/service")
    account = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    assert {account / ".ssh", Path("/srv/service/.ssh")} <= {*hidden_files(validate({}))}

    def unknown(_: int) -> None:
        raise KeyError

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)  # as in a container with a user of no name
    assert Path("/run/secrets") in {*hidden_files(validate({}))}


async def test_programs_work_where_the_directory_of_runs_has_everything_in_it(
    host: Path, monkeypatch: pytest.MonkeyPatch
):
    """`--directory .` in the directory of the project."""
    monkeypatch.chdir(host / "runs")
    for run in ("test", "other"):
        write(host / f"runs/{run}/config.json")
    write(host / "runs/agent.py")
    hidden.hide(hidden_files(validate({"run": "test", "directory": "."})))
    assert await read_by_a_program(host, host / "runs") == {
        str(host / name) for name in ("runs/agent.py", "runs/bus/jetstream/1.blk")
    }
