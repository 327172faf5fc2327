"""Weights of a secured run are served over TLS, to readers with the token that its bus gives to actors."""

import asyncio
import logging
import os
import ssl
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
import uvloop

from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import BusError, ConfigError
from bus.server.nats_server import NatsServer
from bus.server.secure_directory import SecureDirectory
from bus.weight_requests import BlobAccess, BlobAccessAsked
from storage.settings.weights_transport import HttpTransport, PeerConfig
from storage.weights import blob_http, blob_parts
from storage.weights.blob_files import file_name
from storage.weights.blob_guard import SERVER_NAME, BlobGuard, bearer, reader_context
from storage.weights.blob_http import BlobServer, HttpBlobs, ask_access, download, file_in
from storage.weights.blob_sources import Blobs
from storage.weights.swarm import Swarm
from tests.bus.security.secured import As

pytestmark = pytest.mark.nats


async def test_actor_reads_weights_from_the_learner_and_from_another_actor(
    learner: Bus, actor: Bus, origin: HttpBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(blob_parts, "BLOCK_BYTES", 100_000)
    monkeypatch.setattr(blob_http, "PART_BYTES", 30_000)
    data = os.urandom(1_234_567)
    ref = await origin.put([data], "one", 1)
    assert ref.origin.startswith("https://127.0.0.1:")
    assert await Blobs(actor).get(ref) == data
    one, other = Swarm(actor, PeerConfig(), machine="another"), Swarm(actor, PeerConfig(), machine="another")
    assert await one.get(ref) == data
    sent = origin.sent_bytes
    assert await other.get(ref) == data
    assert origin.sent_bytes == sent, "the other actor has it"
    await one.close()
    await other.close()


def test_weights_are_read_on_the_event_loop_of_processes(tmp_path: Path):
    secure = SecureDirectory(tmp_path / "keys")
    server = NatsServer(tmp_path / "nats", secure=secure)
    secure.make(["mine"], server.url)

    def connect(role: str) -> AbstractAsyncContextManager[Bus]:
        config = BusConfig(url=server.url, creds=secure.path / f"mine/{role}.creds")
        return Bus.connect(config, "mine", name=role)

    async def put_and_get() -> bool:
        data = os.urandom(10 << 20)
        async with server, connect("learner") as learner, connect("actor") as actor:
            store = HttpBlobs(learner, tmp_path / "origin", HttpTransport())
            await store.start()
            ref = await store.put([data], "one", 1)
            same = await Blobs(actor).get(ref) == data
            await store.close()
            return same

    assert uvloop.run(put_and_get())


@pytest.mark.parametrize("role", ["judge", "watcher", "storage"])
async def test_token_is_told_to_no_role_that_reads_no_weights(
    role: str, as_role: As, origin: HttpBlobs, monkeypatch: pytest.MonkeyPatch
):
    ref = await origin.put([b"weights"], "one", 1)
    async with as_role(role) as bus:
        with monkeypatch.context() as hurried:
            hurried.setattr(blob_http, "ASK_S", 0.5)
            with pytest.raises(BusError, match="no answer"):
                await ask_access(bus, ref.origin)
    async with as_role("actor") as bus:
        assert await ask_access(bus, ref.origin) is not None


async def test_a_server_that_is_not_heard_everywhere_yet_is_asked_again(
    learner: Bus, actor: Bus, monkeypatch: pytest.MonkeyPatch
):
    """The servers of a cluster tell each other of it within moments."""
    unheard, request = asyncio.Event(), actor.request

    async def noted(*arguments: object, **named: object) -> object:
        try:
            return await request(*arguments, **named)
        except BusError:
            unheard.set()
            raise

    monkeypatch.setattr(actor, "request", noted)
    asking = asyncio.create_task(ask_access(actor, "https://host:1"))
    async with asyncio.timeout(60):
        await unheard.wait()
        access = BlobAccess(token="token", certificate="certificate")

        async def admit(_: BlobAccessAsked) -> list[BlobAccess]:
            return [access]

        await learner.serve(blob_http._access_subject(learner, "https://host:1"), BlobAccessAsked, admit)
        assert await asking == access
    monkeypatch.setattr(blob_http, "HEARD_S", 0.0)
    with pytest.raises(BusError, match="nobody serves"):
        await ask_access(actor, "https://host:2")


async def test_requests_without_the_right_token_get_401_and_those_without_tls_nothing(
    actor: Bus, origin: HttpBlobs
):
    ref = await origin.put([b"weights"], "one", 1)
    access = await ask_access(actor, ref.origin)
    assert access is not None
    tls = {"ssl": reader_context(access), "server_hostname": SERVER_NAME}
    tokens = ("", "Bearer ", f"Bearer {access.token}x", f"Bearer {access.token[:-1]}", access.token, "\udcff")
    async with aiohttp.ClientSession() as session:
        for url in (f"{ref.origin}/{file_name(ref)}", f"{ref.origin}/missing.blob"):
            for given in tokens:
                headers = {"Authorization": given} if given else {}
                async with session.get(url, headers=headers, **tls) as answer:
                    assert answer.status == 401, given
                    assert b"weights" not in await answer.read()
        async with session.get(url, headers={"Authorization": bearer(access)}, **tls) as answer:
            assert answer.status == 404
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"{ref.origin}/{file_name(ref)}".replace("https:", "http:"))


async def test_reader_trusts_no_other_server_and_sends_no_token_in_the_clear(
    actor: Bus, origin: HttpBlobs, as_role: As, tmp_path: Path
):
    ref = await origin.put([b"weights"], "one", 1)
    other = BlobGuard().access
    with pytest.raises(BusError, match="CERTIFICATE_VERIFY_FAILED"):
        await download(ref.origin, ref, BlobAccess(token="x", certificate=other.certificate))
    with pytest.raises(BusError, match="in the clear"):
        await download(ref.origin.replace("https:", "http:"), ref, other)


async def test_host_without_a_token_is_not_used_on_a_secured_bus(
    actor: Bus, origin: HttpBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ref = await origin.put([b"weights"], "one", 1)
    one, other = Swarm(actor, PeerConfig(), machine="another"), Swarm(actor, PeerConfig(), machine="another")
    one._url = "https://127.0.0.1:1"  # it serves without a token
    assert await one.get(ref) == b"weights"
    with structlog.testing.capture_logs() as logs:
        assert await other.get(ref) == b"weights"
    assert "host_of_weights_avoided" in [entry["event"] for entry in logs]
    await one.close()
    await other.close()


async def test_advertised_url_without_tls_is_refused(learner: Bus, tmp_path: Path):
    config = HttpTransport(advertise="http://elsewhere:1")
    with pytest.raises(ConfigError, match="write https://"):
        await HttpBlobs(learner, tmp_path, config).start()


async def test_token_is_in_no_log_repr_or_url(
    actor: Bus, origin: HttpBlobs, capfd: pytest.CaptureFixture, request: pytest.FixtureRequest
):
    everything = logging.StreamHandler()  # to stderr
    request.addfinalizer(partial(logging.root.removeHandler, everything))
    request.addfinalizer(partial(logging.root.setLevel, logging.root.level))
    logging.root.addHandler(everything)
    logging.root.setLevel(logging.DEBUG)
    ref = await origin.put([b"weights"], "one", 1)
    access = await ask_access(actor, ref.origin)
    assert access is not None
    await origin.delete(ref)
    with pytest.raises(BusError, match="404") as failed:
        await Blobs(actor).get(ref)
    said = f"{''.join(capfd.readouterr())}{failed.value!r}{access!r}{ref!r}"
    assert access.token not in said


async def test_connections_that_never_become_tls_give_way(
    learner: Bus, actor: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(blob_http, "most_connections", lambda: 8)
    store = HttpBlobs(learner, tmp_path, HttpTransport())
    await store.start()
    ref = await store.put([b"own"], "one", 1)
    port = int(ref.origin.rpartition(":")[2])
    mute = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(reader.read() for reader, _ in mute[:20]), return_exceptions=True)
        assert await Blobs(actor).get(ref) == b"own"
    for _, writer in mute:
        writer.close()
    await store.close()


@pytest.mark.parametrize("secured", [True, False])
async def test_reader_that_takes_nothing_is_cut_off(
    actor: Bus, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], secured: bool,
):  # fmt: skip
    monkeypatch.setattr(blob_http, "STALLED_S", 0.3)
    (tmp_path / "big.blob").write_bytes(bytes(64 << 20))
    server = BlobServer(partial(file_in, tmp_path), HttpTransport(), setting="x.port")
    port = int((await server.start(actor if secured else bus)).rpartition(":")[2])
    cut, send = asyncio.Event(), blob_http._send

    async def watched(*arguments: Any) -> Any:
        try:
            return await send(*arguments)
        except ConnectionResetError:
            cut.set()
            raise

    monkeypatch.setattr(blob_http, "_send", watched)
    tls: dict[str, Any] = {}
    header = ""
    if server.access is not None:
        tls = {"ssl": reader_context(server.access), "server_hostname": SERVER_NAME}
        header = f"Authorization: {bearer(server.access)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000, **tls)
    writer.write(f"GET /big.blob HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode())
    async with asyncio.timeout(60):
        await cut.wait()
        taken = 0
        with suppress(ConnectionResetError, ssl.SSLError):
            while part := await reader.read(1 << 20):
                taken += len(part)
    assert taken < 64 << 20
    writer.close()
    await server.close()
    assert "Traceback" not in capfd.readouterr().err
