"""Fixtures that own the real servers and the connection of a test."""

import asyncio
import gc
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import hypothesis
import pytest
import structlog

from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import BusError
from bus.server.nats_server import NatsServer
from bus.streams import consume
from storage.dispatch import dispatcher
from tests.command_line import arguments_assembled_once
from tests.object_store import ObjectStore
from tests.stream_requests import StreamRequests

hypothesis.settings.load_profile("ci")  # the same examples everywhere, however slow the machine
gc.disable()  # until all is imported and collected, of which hardly anything is garbage
UNFREEZE = gc.unfreeze
gc.unfreeze = lambda: (
    None
)  # what is imported stays frozen when a service that a test ran in this process ends
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for all processes: many share few cores, and would spin
# CUDA that is asked for GPUs can no longer be used in forked workers; NVIDIA's management library can.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("GOMAXPROCS", "1")  # nats-server's threads too
os.environ.setdefault("GOGC", "1000")  # and it would look for garbage in its few MB all the time
IN_MEMORY = Path("/dev/shm")
IN_MEMORY_BYTES = 16 << 30
"""Room there that suffices: tests use some MiB, but nats-server takes as many streams as three quarters of it
would hold at their largest, and those of two runs may grow to 9 GiB."""
if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > IN_MEMORY_BYTES:
    # Stores, ledgers and servers wait for their disk at every step: without, tests take a third less CPU.
    for name in ("PYTEST_DEBUG_TEMPROOT", "TMPDIR"):
        os.environ.setdefault(name, str(IN_MEMORY))
QUICK_RENDERER = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], QUICK_RENDERER])
pytest_plugins = ["tests.workers"]
RUN = "test"
SUITES = ("slow", "nightly", "sglang")
"""Markers that have a target of the Makefile each, which collects no other files."""
LONGEST = {
    "test_admission.py", "test_agent.py", "test_bus_requests.py", "test_cluster.py", "test_code_tests.py",
    "test_consume.py", "test_damaged_share.py", "test_dashboard_page.py", "test_docs.py",
    "test_enemies.py", "test_exact_logprobs.py", "test_fsdp_trainer.py", "test_gpu_requirements.py",
    "test_learner_group.py", "test_long_lived_agent.py", "test_lora_backends.py",
    "test_lora_of_experts.py", "test_mtp_checkpoint.py", "test_objectives.py", "test_offload.py",
    "test_opting_out.py", "test_parallelisms.py", "test_payment.py", "test_permissions.py",
    "test_price_agent.py", "test_quantisation_aware.py", "test_reader.py", "test_redelivery.py",
    "test_resume.py", "test_sandbox.py", "test_service.py", "test_supervisor.py", "test_tail.py",
    "test_torchrun.py", "test_trainer.py",
}  # fmt: skip
"""Files that take the longest beside whole runs."""
Connect = Callable[[str], AbstractAsyncContextManager[Bus]]


def mark_others(items: list[pytest.Item]) -> None:
    """Apply `pytest.mark.first(n, others=MARK)`: parametrizations of a test beyond the first n get MARK.

    Those that have that marker, or are nightly, are not counted."""
    counted = Counter[tuple[str, str]]()
    for item in items:
        for mark in list(item.iter_markers("first")):
            others = mark.kwargs["others"]
            if any(item.get_closest_marker(name) for name in (others.name, "nightly")):
                continue
            test = item.nodeid.partition("[")[0], others.name
            counted[test] += 1
            if counted[test] > mark.args[0]:
                item.add_marker(others)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put whole runs and the longest files first: with the longest last, one worker would wait for the other.

    Files must name the markers of their tests, by which the Makefile finds the files to collect."""
    mark_others(items)
    for name in SUITES:
        marked = {item.path for item in items if item.get_closest_marker(name)}
        for path in sorted(marked):
            if f"mark.{name}" not in path.read_text():
                raise pytest.UsageError(f"{path} has tests of pytest.mark.{name}: it must name that marker")
    items.sort(key=lambda item: ("e2e" not in item.path.parts, item.path.name not in LONGEST))


def pytest_collection_finish() -> None:
    """Leave what is imported out of garbage collections: tests begin many, and each would look at millions of
    objects again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def quick_command_line() -> Iterator[None]:
    """A test that calls the command line does not assemble the arguments of its command again."""
    with arguments_assembled_once():
        yield


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo what a test configures of logging: a command that it calls sets its own level."""
    settings = structlog.get_config()
    yield
    structlog.configure(**settings)


@pytest.fixture
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is left out of garbage collections, as in a process that begins."""
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A fresh nats-server of the test's own, which it may kill and start again."""
    running = NatsServer(tmp_path / "nats")
    await running.start()
    yield running
    with suppress(BusError):  # the test may have ended it
        await running.kill()  # ten times quicker than to stop it


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """The nats-server of all tests that take none of their own, one after another."""
    running = NatsServer(tmp_path_factory.mktemp("nats"))
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(running.start())
        yield running
        runner.run(running.kill())


@pytest.fixture
def bus_server(request: pytest.FixtureRequest) -> NatsServer:
    """The server that `connect` and `bus` lead to, without streams: `server` where the test takes that, else
    the shared one, which takes half as long."""
    if "server" in request.fixturenames:
        return request.getfixturevalue("server")
    running = request.getfixturevalue("shared_server")
    with StreamRequests(running.url) as requests:
        requests.remove_all()
    return running


@pytest.fixture
def connect(bus_server: NatsServer) -> Connect:
    """Opens further connections to `bus_server`, by name, as other processes would."""
    return lambda name: Bus.connect(BusConfig(url=bus_server.url), RUN, name=name)


@pytest.fixture
async def bus(bus_server: NatsServer, connect: Connect, quick: None) -> AsyncIterator[Bus]:
    """A connection for run "test" with its streams, the consumers of two shards and its keys."""
    async with connect("test") as connected:
        with StreamRequests(bus_server.url) as requests:
            requests.create(connected.topology, shards=2)
        yield connected


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll often, so that a test waits for nothing but what it tests."""
    monkeypatch.setattr(consume, "POLL_S", 0.1)
    monkeypatch.setattr(dispatcher, "POLL_S", 0.05)
    monkeypatch.setattr(dispatcher, "LONG_POLL_S", 0.3)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[ObjectStore]:
    """The one that `object_store` empties for each test."""
    server = ObjectStore()
    yield server
    server.kill()


@pytest.fixture
def object_store(
    s3_server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectStore]:
    """An S3 server with one bucket, "bucket", which s3:// leads to in this test and its processes."""
    from s3fs import S3FileSystem

    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }
    s3_server.begin()
    for name, value in {**environment, "AWS_ENDPOINT_URL": s3_server.url}.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    s3_server.create_bucket("bucket")
    yield s3_server
    S3FileSystem.clear_instance_cache()
