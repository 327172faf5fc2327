"""Tests what a user can get wrong, through the command line: one clear message, status 2, nobody left behind.

Most command lines are called in this process; one of each kind is a process of its own.

Also that a run survives garbage on its bus, and two Ctrl-C.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from bus.config import BusConfig
from bus.connection import Bus
from bus.messages import RunRecord
from bus.server.nats_server import free_port, nats_binary
from launch.process.runtime import TEMPORARY
from soak.local_run import launch_command
from tests.e2e.commands import wait_until
from tests.e2e.conftest import Refused, refusal

LAUNCH = (sys.executable, "-m", "launch")
NOBODY = "nats://127.0.0.1:1"
QUICK = ("--bus.connect-timeout-s", "0.3", "--bus.join-timeout-s", "0.3")
ENV = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
START_S = 60.0


def refused_process(*arguments: str | Path) -> str:
    """Return the one message that a process `launch ...` ends with; the status says whose mistake it is."""
    command = [*LAUNCH, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, env=ENV)
    return refusal(done.returncode, done.stderr)


@contextmanager
def launched(*arguments: str | Path, log: Path, until: str) -> Iterator[subprocess.Popen]:
    """A `launch ...` that has said `until`; what it says goes to `log`. It is gone at the end."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [*LAUNCH, *map(str, arguments)], stdout=output, stderr=output, env=ENV, start_new_session=True
        )
    try:
        wait_until(lambda: until in log.read_text() or process.poll() is not None, repr(until))
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        process.terminate()
        try:
            process.wait(START_S)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def bus_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a running `launch bus`, beside its log."""
    directory = tmp_path_factory.mktemp("bus")
    bus = ("bus", "--port", "0", "--directory", directory / "nats")
    with launched(*bus, log=directory / "log", until="bus_ready"):
        yield directory / "nats"


@pytest.fixture(scope="module")
def bus_url(bus_directory: Path) -> str:
    """The address of that bus."""
    return re.search(r"url=(\S+)", bus_directory.with_name("log").read_text())[1]


@pytest.fixture(scope="module")
def storage(bus_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen]:
    """A `launch storage` of run "stored"."""
    directory = tmp_path_factory.mktemp("storage")
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"prompt": "sort 21", "label": "12"}\n')
    arguments = ("--run", "stored", "--bus", bus_url, "--prompts", prompts, "--directory", directory)
    small = ("--sampling.max-new-tokens", "8", "--model.dtype", "float32")
    with launched("storage", *arguments, *small, log=directory / "log", until="storage_ready") as process:
        yield process


# --- prompts, rewards, names: known before anything starts ---

GOOD = '{"prompt": "sort 21", "label": "12"}\n'


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "missing.jsonl: no such file"),
        ("empty.jsonl", "", "empty.jsonl: holds no rows"),
        ("torn.jsonl", GOOD + '{"prompt": "sort', "torn.jsonl, line 2: not JSON (Unterminated string"),
        (
            "other.jsonl",
            GOOD + '{"promt": "sort 1"}\n',
            "other.jsonl, line 2: no key 'prompt'; did you mean 'promt'?",
        ),
    ],
)
def test_local_refuses_prompts_that_it_cannot_read(
    refused: Refused, tmp_path: Path, name: str, content: str | None, message: str
):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert message in refused("local", "--prompts", tmp_path / name, "--directory", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--reward", "exakt"), "no reward named 'exakt': did you mean 'exact'?"),
        (("--reward", "my_pkg:fn"), "reward 'my_pkg:fn': importing 'my_pkg' failed: ModuleNotFoundError"),
        (("--data.task", "sotr"), "no built-in task 'sotr': did you mean 'sort'?"),
        (("--run", "a b"), "run name 'a b'"),
        (("--model.path", "nowhere"), "model.path: nowhere is not a model directory: there is no such "),
        (("--warmup.demonstrations", "nowhere.jsonl"), "nowhere.jsonl: no such file"),
    ],
)
def test_local_refuses_what_does_not_exist(
    refused: Refused, tmp_path: Path, arguments: tuple[str, ...], message: str
):
    assert message in refused("local", "--preset", "sort", "--directory", tmp_path, *arguments)


@pytest.mark.slow
def test_a_process_ends_with_the_message_and_the_status(tmp_path: Path):
    message = refused_process("local", "--prompts", tmp_path / "missing.jsonl", "--directory", tmp_path)
    assert "missing.jsonl: no such file" in message


@pytest.mark.slow
def test_a_run_is_launched_once_at_a_time(refused: Refused, tmp_path: Path):
    """Whoever holds the lock, even its parts alone after a crash, keeps others out."""
    (tmp_path / "sort").mkdir()
    with (tmp_path / "sort" / "lock").open("w") as lock:
        lock.write(str(os.getpid()))
        lock.flush()
        subprocess.run(["flock", "--nonblock", str(lock.fileno())], pass_fds=[lock.fileno()], check=True)
        message = refused("local", "--preset", "sort", "--directory", tmp_path)
    assert f"run 'sort' is already going on in {tmp_path / 'sort'}, process {os.getpid()}" in message


# --- the bus ---


@pytest.mark.parametrize("command", [("actors",), ("learner",), ("storage", "--data.task", "sort")])
def test_a_bus_that_cannot_be_reached_is_named(refused: Refused, tmp_path: Path, command: tuple[str, ...]):
    began = time.monotonic()
    message = refused(*command, "--bus", NOBODY, *QUICK, "--directory", tmp_path, wanted=TEMPORARY)
    assert message.startswith(f"cannot use the bus at {NOBODY} ([Errno 111] Connection refused, tried for")
    assert "launch bus" in message
    assert time.monotonic() - began < 30


@pytest.mark.nats
def test_a_bus_that_refuses_us_is_named_without_the_password(refused: Refused, tmp_path: Path):
    port = free_port("127.0.0.1")
    config = tmp_path / "nats.conf"
    config.write_text(f'listen: "127.0.0.1:{port}"\nauthorization {{ user: ada, password: right }}\n')
    log = tmp_path / "log"
    server = subprocess.Popen([nats_binary(), "-c", str(config), "-l", str(log)])
    try:
        wait_until(lambda: log.exists() and "Server is ready" in log.read_text(), "the server")
        message = refused("actors", "--bus", f"nats://ada:wrong@127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait()
    assert "Authorization Violation" in message
    assert "wrong" not in message


@pytest.mark.nats
def test_a_port_in_use_is_refused(refused: Refused, bus_url: str, tmp_path: Path):
    port = bus_url.rpartition(":")[2]
    message = refused("bus", "--port", port, "--directory", tmp_path)
    assert message.startswith(f"cannot listen on 127.0.0.1:{port} (Address already in use)")


@pytest.mark.nats
@pytest.mark.slow
def test_two_buses_do_not_share_a_directory(refused: Refused, bus_directory: Path):
    bus = ("bus", "--port", "0", "--directory", bus_directory)
    assert "another `launch bus` keeps its streams in" in refused(*bus)


@pytest.mark.slow
@pytest.mark.nats
@pytest.mark.parametrize("command", ["actors", "learner"])
def test_a_run_that_nobody_stores_is_waited_for_and_named(refused: Refused, bus_url: str, command: str):
    message = refused(command, "--run", "nobody", "--bus", bus_url, *QUICK, wanted=TEMPORARY)
    assert message.startswith("run 'nobody': waited 0.3 s for 'run'")
    assert "is `launch storage --run nobody` running on this bus?" in message


@pytest.mark.slow
@pytest.mark.nats
@pytest.mark.parametrize(("flags", "status"), [((), 0), (("--stopped-status", "75"), 75)])
def test_a_learner_that_waits_for_its_run_stops_when_asked(bus_url: str, flags: tuple[str, ...], status: int):
    command = ("learner", "--run", "nobody", "--bus", bus_url, *flags)
    process = subprocess.Popen([*LAUNCH, *command], env=ENV, stderr=subprocess.PIPE, text=True)
    connected = psutil.Process(process.pid).net_connections
    wait_until(lambda: any(c.status == "ESTABLISHED" for c in connected()), "its connection")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=START_S)
    assert (process.returncode, stderr) == (status, "")


@pytest.mark.slow
@pytest.mark.nats
def test_storage_survives_what_it_cannot_read(bus_url: str, storage: subprocess.Popen):
    """Garbage, and a message of a later version, are set aside; the run goes on."""

    async def send_garbage() -> None:
        async with Bus.connect(BusConfig(url=bus_url), "stored", name="vandal") as bus:
            await bus.wait_for("run", RunRecord, timeout_s=START_S, hint="storage has made its streams")
            subject = bus.subject("trajectories", 0)
            for data in (b"garbage", b"", b"\x82\xa3tag\xaatrajectory\xaeschema_version\xcd\x03\xe7"):
                await bus.js.publish(subject, data)

            async def held(stream: str) -> int:
                return (await bus.js.stream_info(bus.topology.stream(stream))).state.messages

            async with asyncio.timeout(START_S):
                while (await held("DEAD"), await held("TRAJECTORIES")) != (3, 0):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.05)

    asyncio.run(send_garbage())
    assert storage.poll() is None


# --- with torch: slow ---


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model directory that fits."""
    from learner.config.model import ScratchModel
    from learner.initial.scratch_model import build_model_directory

    directory = tmp_path_factory.mktemp("models") / "tiny"
    sizes = ScratchModel(hidden_size=16, layers=1, heads=2, kv_heads=1, intermediate_size=16, context=64)
    build_model_directory(directory, sizes, seed=0)
    return directory


def change(file: Path, **values: object) -> None:
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def without_tokenizer(model: Path) -> None:
    for file in model.glob("*token*"):
        file.unlink()


def without_chat_template(model: Path) -> None:
    change(model / "tokenizer_config.json", chat_template=None)
    (model / "chat_template.jinja").unlink(missing_ok=True)


def with_small_vocabulary(model: Path) -> None:
    change(model / "config.json", vocab_size=8)


def with_torn_config(model: Path) -> None:
    (model / "config.json").write_text("{")


def of_unknown_kind(model: Path) -> None:
    change(model / "config.json", model_type="mystery")


@pytest.mark.slow
@pytest.mark.nats
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (None, "is not a model directory: there is no such directory"),
        (with_torn_config, "config.json"),
        (of_unknown_kind, "mystery"),
        (without_weights, "has neither model.safetensors nor"),
        (without_tokenizer, "tokenizer"),
        (without_chat_template, "the tokenizer has no chat template"),
        (with_small_vocabulary, "the model embeds 8: they do not belong together"),
    ],
)
def test_a_model_that_cannot_work_is_refused(
    refused: Refused, bus_url: str, storage: subprocess.Popen, model: Path, tmp_path: Path,
    spoil: Callable[[Path], None] | None, message: str,
):  # fmt: skip
    spoilt = tmp_path / "spoilt"
    if spoil is not None:
        subprocess.run(["cp", "-r", model, spoilt], check=True)
        spoil(spoilt)
    arguments = ("--run", "stored", "--bus", bus_url, "--directory", tmp_path, "--model.path", spoilt)
    said = refused("learner", *arguments)
    assert message in said
    assert str(spoilt) in said


# --- whole runs ---

SMALL = """
run = "small"
data = { task = "sort" }
admission = { groups_per_step = 4, samples_per_prompt = 4, max_staleness = 1 }
sampling = { max_new_tokens = 7 }
warmup = { steps = 5, batch_size = 8 }
learner = { steps = 6, publish_dtype = "float32" }
evaluation = { every_versions = 0 }
[model]
dtype = "float32"
scratch = { hidden_size = 16, layers = 1, heads = 2, kv_heads = 1, intermediate_size = 16, context = 64 }
"""


@contextmanager
def local(directory: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """`launch local` of a small run; it is gone at the end."""
    file = directory / "small.toml"
    file.write_text(SMALL)
    command = [*LAUNCH, "local", "--config", file, "--directory", directory, *arguments]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=ENV, **piped) as process:
        try:
            yield process
        finally:
            process.kill()


def family(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def says(process: subprocess.Popen, wanted: str) -> str:
    """Return what it wrote up to `wanted`."""
    said = ""
    for line in process.stdout:
        said += line
        if wanted in line:
            return said
    raise AssertionError(f"{wanted!r} was never said:\n{said}\n{process.stderr.read()}")


@pytest.mark.nightly
@pytest.mark.nats
@pytest.mark.timeout(600)
def test_a_run_that_is_interrupted_again_and_again_goes_on_where_it_was(tmp_path: Path):
    for moment in ("storage: started", "-> reinforcement learning"):
        with local(tmp_path) as process:
            says(process, moment)
            started = family(process)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=180)
        assert process.returncode == 0, stderr
        assert "Stopped. The same command takes the run up again." in stdout
        assert json.loads((tmp_path / "small" / "summary.json").read_text())["steps"] < 6
        assert psutil.wait_procs(started, timeout=30)[1] == []

    with local(tmp_path) as process:  # the second Ctrl-C comes while the first waits for actors that hang
        says(process, "actor-")
        started = family(process)
        [actors] = [part for part in started if launch_command(part.cmdline()) == "actors"]
        actors.suspend()
        process.send_signal(signal.SIGINT)
        wait_until(lambda: not all(part.is_running() for part in started), "the end of a part")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert psutil.wait_procs(started, timeout=30)[1] == []

    with local(tmp_path, "--learner.optimizer.lr", "0.00021") as process:
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    recorded = json.loads((tmp_path / "small/learner.json").read_text())
    assert recorded["learner"]["optimizer"]["lr"] == 0.00021  # not what the launch before announced
    summary = json.loads((tmp_path / "small" / "summary.json").read_text())
    assert (summary["stage"], summary["steps"], summary["accounted"]) == ("done", 6, True)
    assert summary["trajectories_trained"] == 6 * 4 * 4
