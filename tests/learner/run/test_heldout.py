"""Tests how the learner asks for held-out reward and waits for it."""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from bus.codec import encode
from bus.errors import ConfigError
from bus.evaluation_messages import EvaluationResult, EvaluationTask
from bus.messages import BlobRef, PolicyManifest
from bus.streams.publish import Publisher
from learner.run.evaluation import HeldOut
from storage.settings.evaluation import EvaluationSetConfig

pytestmark = pytest.mark.nats
BLOB = BlobRef(subject="none", chunks=1, size_bytes=1, digest="")
TIMEOUT_S = 60


def manifest(version: int) -> PolicyManifest:
    return PolicyManifest(policy_version=version, incarnation="one", snapshot=BLOB, model=BLOB, stage="rl")


def answer(version: int, incarnation: str = "one", drawn_by: int | None = None) -> EvaluationResult:
    return EvaluationResult(
        policy_version=version, incarnation=incarnation, sampled=0.5, greedy=1.0, prompts=2, seconds=1.0,
        oldest_version=drawn_by or version, newest_version=drawn_by or version,
    )  # fmt: skip


async def test_held_out_prompts_are_found_though_the_bus_is_away_for_a_while(bus, server, monkeypatch):
    await bus.put("heldout", BLOB)
    monkeypatch.setattr(bus.js, "_timeout", 0.2)
    found = HeldOut(bus, "one", lambda result: None, 1.0)
    await server.kill()
    with capture_logs() as logs:
        finding = asyncio.create_task(found.find())
        async with asyncio.timeout(TIMEOUT_S):
            while not any(entry["event"] == "waiting_for_the_bus" for entry in logs):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await server.start()
            await finding
    assert found.prompts == BLOB


async def tell(bus, result: EvaluationResult) -> None:
    name = f"{result.incarnation}-{result.policy_version}-{result.data_set}"
    await Publisher(bus).publish(bus.subject("events", "evaluation"), encode(result), message_id=name)


async def heldout(bus, heard, *, patience_s) -> HeldOut:
    await bus.put("heldout", BLOB)
    found = HeldOut(bus, "one", heard, patience_s)
    await found.find()
    return found


async def test_a_result_counts_for_the_version_that_was_asked_for_whichever_drew_it(bus):
    heard = []
    found = await heldout(bus, heard.append, patience_s=TIMEOUT_S)
    await found.ask(manifest(7))
    waiting = asyncio.create_task(found.measured(7, asyncio.Event()))
    for incarnation in ("dead", "one"):
        await tell(bus, answer(7, incarnation, drawn_by=9))
    async with asyncio.timeout(TIMEOUT_S):
        await waiting
    assert [(r.incarnation, r.policy_version, r.drawn_by) for r in heard] == [("one", 7, (9, 9))]


async def test_the_learner_waits_no_longer_for_a_result_than_its_patience(bus):
    found = await heldout(bus, [].append, patience_s=0.05)
    await found.ask(manifest(7))
    async with asyncio.timeout(TIMEOUT_S):
        await found.measured(7, asyncio.Event())


async def test_a_learner_that_stops_waits_for_no_result(bus):
    found = await heldout(bus, [].append, patience_s=10 * TIMEOUT_S)
    await found.ask(manifest(7))
    stop = asyncio.Event()
    waiting = asyncio.create_task(found.measured(7, stop))
    stop.set()
    async with asyncio.timeout(TIMEOUT_S):
        await waiting


async def test_every_data_set_is_asked_for_as_configured_and_waited_for(bus):
    asked, heard = asyncio.Queue(), []
    await bus.listen(bus.subject("tasks", "evaluation"), EvaluationTask, asked.put_nowait)
    await bus.put("heldout", BLOB)
    await bus.put("heldout.aime", BLOB)
    aime = EvaluationSetConfig(name="aime", prompts="a.jsonl", samples=6, temperature=0.5, max_new_tokens=7)
    found = HeldOut(bus, "one", heard.append, TIMEOUT_S, [aime], samples=4)
    await found.find()
    await found.ask(manifest(7))
    await found.ask(manifest(7))  # changes nothing
    async with asyncio.timeout(TIMEOUT_S):
        tasks = {task.data_set: task for task in [await asked.get(), await asked.get()]}
    assert tasks[""] == EvaluationTask(policy=manifest(7), prompts=BLOB, samples=4)
    assert tasks["aime"] == EvaluationTask(
        policy=manifest(7), prompts=BLOB, data_set="aime", samples=6, pass_at=(1, 2, 4, 6),
        temperature=0.5, max_new_tokens=7,
    )  # fmt: skip
    waiting = asyncio.create_task(found.measured(7, asyncio.Event()))
    await tell(bus, answer(7))
    async with asyncio.timeout(TIMEOUT_S):
        while not heard:  # noqa: ASYNC110 - a subscription is no event
            await asyncio.sleep(0.02)
    assert found.awaits(7)
    assert not waiting.done()
    await tell(bus, replace(answer(7), data_set="aime", samples=6))
    async with asyncio.timeout(TIMEOUT_S):
        await waiting
    assert not found.awaits(7)
    assert asked.empty()


async def test_a_data_set_that_storage_does_not_have_is_refused(bus):
    aime = EvaluationSetConfig(name="aime", prompts="a.jsonl")
    with pytest.raises(ConfigError, match="names 'aime', of which storage has no prompts"):
        await HeldOut(bus, "one", [].append, 1.0, [aime]).find()


@pytest.mark.parametrize(("answered", "missing"), [((8,), [[7, 9]]), ((7, 8, 9), [])])
async def test_versions_that_nobody_answered_for_are_named(bus, answered, missing):
    found = await heldout(bus, [].append, patience_s=TIMEOUT_S)
    for version in (7, 8, 9):
        await found.ask(manifest(version))
    for version in answered:
        await tell(bus, answer(version))
        async with asyncio.timeout(TIMEOUT_S):
            await found.measured(version, asyncio.Event())
    with capture_logs() as logs:
        found.warn_of_missing()
    assert [log["policy_versions"] for log in logs] == missing
