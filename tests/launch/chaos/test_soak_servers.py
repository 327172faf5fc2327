import asyncio

from bus.waiting import cancelled
from soak import servers
from soak.faults import send_signal
from soak.servers import Server
from tests.storage.serving import until


async def test_a_server_that_ends_gets_no_signal(tmp_path, monkeypatch):
    useless = asyncio.Event()
    monkeypatch.setattr(servers, "until_it_cannot_store", lambda _: useless.wait())
    server = Server(tmp_path, servers.free_port(servers.HOST), None)
    keeping = asyncio.create_task(server.keep())
    try:
        await until(lambda: server.pid is not None)
        server.up.clear()
        ending = asyncio.Event()
        stop = server._nats.stop

        async def stop_slowly() -> None:
            stopping = asyncio.create_task(stop())
            await asyncio.sleep(0)
            ending.set()
            await stopping

        monkeypatch.setattr(server._nats, "stop", stop_slowly)
        useless.set()
        await ending.wait()
        assert not server.down.is_set()
        send_signal(server, 0)
        await server.down.wait()
        assert server.pid is None
    finally:
        await cancelled(keeping)
