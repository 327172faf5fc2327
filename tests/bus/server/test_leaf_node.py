"""A process that connects to a leaf node uses the streams of the JetStream domain that it names."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from bus.config import BusConfig
from bus.connection import Bus
from bus.connection.roles import hold_role
from bus.messages import RoleHolder
from bus.server.nats_server import NatsServer, free_port
from bus.server.secure_directory import SecureDirectory
from bus.streams.blob_store import get_blob, put_blob
from bus.streams.consume import Inbox
from bus.streams.publish import Publisher
from bus.topology import ensure

pytestmark = pytest.mark.nats
HOLDER = RoleHolder(incarnation="x", host="h", pid=1)


class DomainServer(NatsServer):
    """A server whose JetStream has a domain, and that is one end of a leaf node's link."""

    def __init__(
        self, directory: Path, domain: str, leafnodes: str, secure: SecureDirectory | None = None
    ) -> None:
        super().__init__(directory, secure=secure)
        self._domain, self._leafnodes = domain, leafnodes

    def _config(self) -> str:
        whole = super()._config().replace("jetstream {", f"jetstream {{ domain: {self._domain},")
        return f"server_name: {self._domain}\n{whole}leafnodes {{ {self._leafnodes} }}\n"


@pytest.fixture
async def sites(tmp_path: Path) -> AsyncIterator[tuple[str, str]]:
    """URLs of a hub, and of a leaf node which has a JetStream of its own."""
    port = free_port("127.0.0.1")
    link = f'remotes: [{{ url: "nats://127.0.0.1:{port}" }}]'
    async with (
        DomainServer(tmp_path / "hub", "hub", f'listen: "127.0.0.1:{port}"') as hub,
        DomainServer(tmp_path / "leaf", "leaf", link) as leaf,
    ):
        yield hub.url, leaf.url


async def test_actor_at_a_leaf_node_works_on_the_streams_of_the_hub(sites: tuple[str, str]):
    hub, leaf = sites
    async with (
        Bus.connect(BusConfig(url=hub), "test", name="storage") as storage,
        Bus.connect(BusConfig(url=leaf, domain="hub"), "test", name="actor") as actor,
    ):
        await ensure(storage.js, storage.topology, shards=1)
        await storage.create_keys()
        await storage.put("run", HOLDER)
        async with asyncio.timeout(60):
            assert await actor.wait_for("run", RoleHolder, timeout_s=60, hint="the link comes up") == (HOLDER)
            await Publisher(storage).publish(storage.subject("tasks", "rollout", 7), b"task", message_id="7")
            inbox = Inbox(actor, "TASKS", "rollout")
            while not (taken := await inbox.take(1, 20.0)):
                pass
            assert taken[0].data == b"task"
            await taken[0].ack_sync(timeout=20)
            await Publisher(actor).publish(actor.subject("trajectories", 0), b"done", message_id="t")
            [stored] = await Inbox(storage, "TRAJECTORIES", "shard-0").take(1, 20.0)
            assert stored.data == b"done"
            ref = await put_blob(storage, Publisher(storage), b"weights" * 9, "policy", stream="weights")
            assert await get_blob(actor, ref) == b"weights" * 9
            async with hold_role(actor, "learner", "a"):
                assert await storage.get("role.learner", RoleHolder) is not None
        state = (await storage.js.stream_info(storage.topology.stream("TASKS"))).state
        assert state.messages == 0


class LeafKeys(SecureDirectory):
    """The same credentials at a leaf node, which has users but no streams of the run."""

    def _accounts(self, run: str) -> dict[str, object]:
        roles = f"roles-{run}"
        return {roles: {"users": super()._accounts(run)[roles]["users"]}}


async def test_role_at_a_leaf_node_of_a_secured_bus_works_on_the_streams_of_the_hub(tmp_path: Path):
    port = free_port("127.0.0.1")
    listen = f'listen: "127.0.0.1:{port}", authorization {{ user: l, password: l, account: "roles-test" }}'
    link = f'remotes: [{{ url: "nats://l:l@127.0.0.1:{port}", account: "roles-test" }}]'
    keys = SecureDirectory(tmp_path / "keys")
    hub = DomainServer(tmp_path / "hub", "hub", listen, keys)
    leaf = DomainServer(tmp_path / "leaf", "leaf", link, LeafKeys(tmp_path / "keys"))
    keys.make(["test"], hub.url)

    def connect(role: str, url: str, domain: str | None = None) -> AbstractAsyncContextManager[Bus]:
        config = BusConfig(url=url, creds=tmp_path / f"keys/test/{role}.creds", domain=domain)
        return Bus.connect(config, "test", name=role)

    async with hub, leaf, connect("storage", hub.url) as storage:
        await ensure(storage.js, storage.topology, shards=1)
        await storage.create_keys()
        await storage.put("run", HOLDER)
        for domain in (None, "hub"):
            async with connect("actor", leaf.url, domain) as actor, asyncio.timeout(60):
                assert await actor.wait_for("run", RoleHolder, timeout_s=60, hint="the link") == HOLDER
                name = f"task-{domain}"
                tasks = storage.subject("tasks", "rollout", 7)
                await Publisher(storage).publish(tasks, name.encode(), message_id=name)
                [taken] = await Inbox(actor, "TASKS", "rollout").take(1, 20.0)
                await taken.ack_sync(timeout=20)
                await Publisher(actor).publish(actor.subject("trajectories", 0), b"done", message_id=name)
                [stored] = await Inbox(storage, "TRAJECTORIES", "shard-0").take(1, 20.0)
                await stored.ack_sync(timeout=20)
                assert (taken.data, stored.data) == (name.encode(), b"done")


async def test_a_domain_that_cannot_be_part_of_a_subject_is_refused():
    for domain in ("a.b", "", "*", "a b"):
        with pytest.raises(ValueError, match="domain"):
            BusConfig(domain=domain)
