"""On a secured run nobody who has an actor's credentials can give another actor other weights."""

import asyncio
import os
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from bus.codec import encode
from bus.connection import Bus
from bus.messages import PolicyManifest
from bus.weight_requests import PartsAsked, PartSource
from storage.settings.weights_transport import PeerConfig
from storage.weights import blob_parts, blob_sources
from storage.weights.blob_http import BlobServer, HttpBlobs, Served
from storage.weights.part_tracker import HAD
from storage.weights.swarm import HeldBlob, Swarm
from tests.bus.security.secured import As

pytestmark = pytest.mark.nats
TIMEOUT_S = 60
BLOCK = 50_000
PARTS = 20


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_parts, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(blob_sources, "SMALL_BYTES", BLOCK)


async def test_an_answer_that_names_a_stranger_brings_none_of_its_bytes(actor: Bus, origin: HttpBlobs):
    """Each answer to where parts are also sends the actor to a stranger, for parts that there are and not."""
    data = os.urandom(PARTS * BLOCK)
    ref = await origin.put([data], "one", 1)
    asked = 0

    def forged_weights(name: str) -> Served:
        nonlocal asked
        asked += 1
        held = HeldBlob(ref)
        held.states[:] = bytes([HAD] * PARTS)
        return held

    stranger = BlobServer(forged_weights, PeerConfig(), setting="")
    url = await stranger.start(actor)
    honest, numbers = origin._tracker.sources, (0, -1, *range(PARTS), PARTS, 1 << 40)

    def forged(asked: PartsAsked, part_bytes: int) -> tuple[PartSource, ...]:
        named = (PartSource(part=part, url=url, access=stranger.access) for part in numbers)
        return (*honest(asked, part_bytes), *named)

    origin._tracker.sources = forged  # type: ignore[method-assign]
    swarm = Swarm(actor, PeerConfig(), machine="another")
    with capture_logs() as logs:
        assert await asyncio.wait_for(swarm.get(ref), TIMEOUT_S) == data
    assert {entry["url"] for entry in logs if entry["event"] == "part_not_fetched"} == {url}
    assert 1 <= asked <= PARTS, "it is avoided after its first part"
    await swarm.close()
    await stranger.close()


async def test_a_manifest_that_an_actor_forges_is_none(
    as_role: As, learner: Bus, actor: Bus, origin: HttpBlobs
):
    """The forger may write anywhere, and has the credentials of an actor to sign with."""
    ref = await origin.put([os.urandom(PARTS * BLOCK)], "one", 1)
    manifest = PolicyManifest(policy_version=1, incarnation="one", snapshot=ref, model=ref, stage="rl")
    await learner.put("policy", manifest)
    forged = replace(
        manifest, policy_version=2, snapshot=replace(ref, part_sha256=os.urandom(len(ref.part_sha256)))
    )
    heard: list[PolicyManifest] = []
    notice = actor.subject("notice", "policy")
    await actor.listen(notice, PolicyManifest, heard.append)
    assert actor.signatures is not None
    sealed = actor.signatures.sealed("policy", encode(forged))
    async with as_role("operator") as enemy:
        for data in (sealed, encode(forged)):
            await enemy.js.publish(f"$KV.{enemy.topology.bucket}.policy", data)
            await enemy.client.publish(notice, data)
            await enemy.client.flush()
            assert await actor.get("policy", PolicyManifest) is None
    await learner.put("policy", manifest)
    await learner.notify(learner.subject("notice", "policy"), manifest)
    async with asyncio.timeout(TIMEOUT_S):
        while not heard:  # noqa: ASYNC110 - a notice has no event of its own
            await asyncio.sleep(0.01)
    assert heard == [manifest]
    assert await actor.get("policy", PolicyManifest) is not None
