"""How the learner asks for held-out accuracy and waits for it."""

import asyncio

import pytest

from bus.codec import encode
from bus.messages import BlobRef, EvaluationResult, PolicyManifest
from bus.publish import Publisher
from learner.heldout import HeldOut

pytestmark = pytest.mark.nats
BLOB = BlobRef(subject="none", chunks=1, size_bytes=1, digest="")
TIMEOUT_S = 20


def manifest(version: int) -> PolicyManifest:
    return PolicyManifest(policy_version=version, incarnation="one", snapshot=BLOB, model=BLOB, stage="rl")


async def heldout(bus, heard, *, patience_s) -> HeldOut:
    await bus.put("heldout", BLOB)
    found = HeldOut(bus, "one", heard, patience_s)
    await found.find()
    return found


async def test_a_result_counts_for_the_version_that_was_asked_for_whichever_drew_it(bus):
    heard = []
    found = await heldout(bus, heard.append, patience_s=TIMEOUT_S)
    await found.ask(manifest(7))
    waiting = asyncio.create_task(found.measured(7))
    for number, incarnation in enumerate(("dead", "one")):
        result = EvaluationResult(
            policy_version=7, incarnation=incarnation, sampled=0.5, greedy=1.0, prompts=2, seconds=1.0,
            oldest_version=8, newest_version=9,
        )  # fmt: skip
        await Publisher(bus).publish(
            bus.subject("events", "evaluation"), encode(result), message_id=f"{number}"
        )
    async with asyncio.timeout(TIMEOUT_S):
        await waiting
    assert [(r.incarnation, r.policy_version, r.drawn_by) for r in heard] == [("one", 7, (8, 9))]


async def test_the_learner_waits_no_longer_for_a_result_than_its_patience(bus):
    found = await heldout(bus, [].append, patience_s=0.05)
    await found.ask(manifest(7))
    async with asyncio.timeout(TIMEOUT_S):
        await found.measured(7)
