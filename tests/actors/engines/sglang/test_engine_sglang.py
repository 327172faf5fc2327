"""The SGLang engine over a real SGLang server on this machine's CPU (`make test-sglang`)."""

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
import torch

from actors.engines.announced_version import Published
from actors.engines.fleet.fleet import Fleet
from actors.engines.sglang.client.weight_labels import weights_label
from actors.engines.sglang.engine import SglangEngine
from actors.engines.sglang.server import server as servers
from actors.settings.engines import SglangEngineConfig
from actors.settings.fleet import FleetConfig
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import EngineError
from bus.messages import BlobRef, PolicyManifest
from bus.server.nats_server import NatsServer
from learner.config.frozen_policies import TeacherConfig
from learner.config.learner import LearnerConfig
from learner.host_memory.copies import host_tensors
from learner.logprobs.served_teachers import ask_teachers
from learner.publication.broadcast import Broadcaster
from storage.weights.tensors import Weights
from tests.actors.sglang_served import (
    FIRST,
    LONG,
    PROMPT,
    SECOND,
    in_flight,
    noted,
    own_server,
    requests_at_the_worker,
    started,
    until,
)
from tests.actors.tiny import recomputed, request
from tests.factories import make_trajectory

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(420)]

ENOUGH = 600
"""Tokens that take longer than to see that a request is at the worker."""
NO_BLOB = BlobRef(subject="none", chunks=1, size_bytes=1, digest="")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model_dir, tmp_path_factory) -> AsyncIterator[SglangEngine]:
    """One server for all tests of this module; starting one takes half a minute."""
    async with own_server(model_dir, tmp_path_factory.mktemp("log")) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared) -> SglangEngine:
    """The shared engine with the first policy as version 0."""
    await shared.load_weights(FIRST.state_dict(), 0)
    return shared


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_those_of_transformers(engine, temperature):
    generation = await engine.generate(request("parity", PROMPT, new=64, temperature=temperature))
    assert (len(generation.token_ids), generation.finish_reason) == (64, "length")
    assert set(generation.policy_versions.tolist()) == {0}
    expected = recomputed(FIRST, PROMPT, generation, temperature)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)


async def test_a_learner_asks_it_as_a_teacher(engine):
    """The log-probs of a scored sequence, and those of the likeliest tokens, are transformers'."""
    trajectory = make_trajectory(tokens=24)
    # The server keeps a prefix that it warmed up with, which begins with 10, under other weights.
    trajectory = replace(trajectory, token_ids=(trajectory.token_ids + 1) % 40)
    ids, places = torch.from_numpy(trajectory.token_ids).long(), np.flatnonzero(trajectory.loss_mask)
    with torch.inference_mode():
        expected = FIRST(ids[None]).logits[0].log_softmax(-1)[places - 1]
    for kl in ({}, {"kl": "top_k", "top_k": 5}):
        learner = LearnerConfig(teacher=TeacherConfig(url=engine.url, outage_s=10.0, **kl))
        answers = await ask_teachers([[trajectory]], learner, vocab_size=40)
        if not kl:
            [logprobs] = answers.logprobs["teacher"]
            sampled = expected.gather(-1, ids[places][:, None])[:, 0]
            np.testing.assert_allclose(logprobs[places], sampled, atol=1e-5)
        else:
            [top] = answers.top_tokens["teacher"]
            np.testing.assert_allclose(top.logprobs[places, :-1], expected.topk(5).values, atol=1e-5)
            assert top.token_ids[places].tolist() == expected.topk(5).indices.tolist()


async def test_temperature_zero_takes_the_likeliest_token(engine):
    generation = await engine.generate(request("greedy", PROMPT, new=16, temperature=0.0))
    with torch.inference_mode():
        expected = FIRST.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False)
    assert generation.token_ids.tolist() == expected[0, len(PROMPT) :].tolist()
    np.testing.assert_allclose(generation.logprobs, recomputed(FIRST, PROMPT, generation), atol=1e-5)


async def test_a_stop_token_is_the_last_token(engine):
    stops = tuple(range(20))
    generation = await engine.generate(request("stop", PROMPT, new=200, stop_token_ids=stops))
    assert generation.finish_reason == "stop"
    assert [token in stops for token in generation.token_ids.tolist()].index(True) == len(
        generation.token_ids
    ) - 1


@pytest.mark.parametrize("update", ["disk", "tensor"])
async def test_weights_arrive_whole_and_in_part(engine, update, monkeypatch):
    monkeypatch.setattr(engine, "_config", engine._config.model_copy(update={"update": update}))
    before = await engine.checksums()
    pause_s = await engine.load_weights(SECOND.state_dict(), 1)
    assert 0 < pause_s < 10
    after = await engine.checksums()
    assert all(after[name] != before[name] for name in before if "norm" not in name and "cos_sin" not in name)
    one = {"model.norm.weight": FIRST.state_dict()["model.norm.weight"] * 2}
    await engine.load_weights(one, 2)
    partly = await engine.checksums()
    assert {name for name in after if partly[name] != after[name]} == {"model.norm.weight"}
    await engine.load_weights(FIRST.state_dict(), 3)
    assert await engine.checksums() == before
    await engine.load_weights({}, 4)
    assert await engine.checksums() == before
    generation = await engine.generate(request(f"after-{update}", PROMPT, new=8))
    assert set(generation.policy_versions.tolist()) == {4}


async def test_elements_that_changed_are_written_where_the_server_has_them(engine, monkeypatch):
    torch.manual_seed(0)
    state, ways = FIRST.state_dict(), []
    for way in ("load_changes", "load_files"):
        monkeypatch.setattr(engine._client, way, noted(getattr(engine._client, way), ways, way))
    for version in (1, 2, 3):
        state = {
            name: torch.where(torch.rand(tensor.shape) < 0.05, tensor * 1.25, tensor)
            for name, tensor in state.items()
        }
        await engine.load_weights(state, version)
    changed = await engine.checksums()
    assert ways == ["load_changes"] * 3
    generation = await engine.generate(request("changed", PROMPT, new=8))
    assert set(generation.policy_versions.tolist()) == {3}
    await engine.load_weights(SECOND.state_dict(), 4)
    await engine.load_weights(state, 5)
    assert ways[3:] == ["load_files"] * 2
    assert await engine.checksums() == changed


@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.parametrize("update", ["disk", "tensor"])
@pytest.mark.parametrize("pause", ["in_place", "retract", "drain"])
async def test_versions_are_exact_across_an_update_in_flight(engine, update, pause, monkeypatch):
    changed = engine._config.model_copy(update={"update": update, "pause": pause})
    monkeypatch.setattr(engine, "_config", changed)
    flights = [started(engine, f"{pause}-{update}-{n}", new=ENOUGH) for n in range(3)]
    await in_flight(engine, *flights)
    await engine.load_weights(SECOND.state_dict(), 1)
    late = await engine.generate(request("late", PROMPT, new=8))
    assert set(late.policy_versions.tolist()) == {1}
    np.testing.assert_allclose(late.logprobs, recomputed(SECOND, PROMPT, late), atol=1e-5)
    for generation in await asyncio.gather(*flights):
        versions = generation.policy_versions.tolist()
        old = versions.count(0)
        assert versions == [0] * old + [1] * (ENOUGH - old)
        before = recomputed(FIRST, PROMPT, generation)[:old]
        np.testing.assert_allclose(generation.logprobs[:old], before, atol=1e-5)
        after = recomputed(SECOND, PROMPT, generation)[old:]
        if pause == "drain":
            assert old == ENOUGH
        elif pause == "retract":  # nothing is left of what the old weights computed
            assert 0 < old < ENOUGH
            np.testing.assert_allclose(generation.logprobs[old:], after, atol=2e-5)
        else:
            assert 0 < old < ENOUGH


async def test_no_answer_of_a_server_that_reports_no_versions_spans_an_update(engine, monkeypatch):
    monkeypatch.setattr(engine, "_facts", replace(engine._facts, reports_spans=False))
    flights = [started(engine, f"cut-{n}", new=LONG) for n in range(3)]
    await in_flight(engine, *flights)
    starting = [started(engine, f"starting-{n}", new=20) for n in range(3)]
    await asyncio.sleep(0)
    await engine.load_weights(SECOND.state_dict(), 1)
    for generation in await asyncio.gather(*flights):
        assert (generation.finish_reason, set(generation.policy_versions.tolist())) == ("abort", {0})
        assert 0 < len(generation.token_ids) < LONG
        np.testing.assert_allclose(generation.logprobs, recomputed(FIRST, PROMPT, generation), atol=1e-5)
    for generation in await asyncio.gather(*starting):
        [version] = set(generation.policy_versions.tolist())  # so it has a token at least
        assert generation.finish_reason == "length" or version == 0
        expected = recomputed((FIRST, SECOND)[version], PROMPT, generation)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)


class Cluster:
    """A learner on the bus that announces a policy and sends it."""

    def __init__(self, bus):
        self.bus = bus
        self.weights = None
        self.fetched = 0
        self.broadcaster = Broadcaster(bus, lambda: self.weights, incarnation="one", timeout_s=120.0)

    def announce(self, model, version):
        tensors = model.state_dict()
        self.weights = Weights.of(version, host_tensors(tensors))
        manifest = PolicyManifest(
            policy_version=version, incarnation="one", snapshot=NO_BLOB, model=NO_BLOB, stage="rl"
        )

        async def fetch(_):
            self.fetched += 1
            return tensors

        return Published(self.bus, manifest, fetch)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory) -> AsyncIterator[Cluster]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    await server.start()
    try:
        async with Bus.connect(BusConfig(url=server.url), "test", name="test") as bus:
            cluster = Cluster(bus)
            await cluster.broadcaster.start()
            yield cluster
            await cluster.broadcaster.close()
    finally:
        await server.kill()


@pytest.fixture
def in_group(engine, cluster, monkeypatch) -> SglangEngine:
    """The shared engine, which takes weights from the learner."""
    monkeypatch.setattr(engine, "_config", engine._config.model_copy(update={"update": "group"}))
    return engine


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.parametrize("pause", ["in_place", "retract", "drain"])
async def test_the_learner_sends_weights_while_generations_are_in_flight(
    in_group, cluster, pause, monkeypatch
):
    engine = in_group
    monkeypatch.setattr(engine, "_config", engine._config.model_copy(update={"pause": pause}))
    await engine.load_published(cluster.announce(FIRST, 1))  # joins the learner's group, which takes seconds
    first = await engine.checksums()
    flights = [started(engine, f"group-{pause}-{n}", new=ENOUGH) for n in range(3)]
    await in_flight(engine, *flights)
    await engine.load_published(cluster.announce(SECOND, 2))
    late = await engine.generate(request("late", PROMPT, new=8))
    assert set(late.policy_versions.tolist()) == {2}
    np.testing.assert_allclose(late.logprobs, recomputed(SECOND, PROMPT, late), atol=1e-5)
    for generation in await asyncio.gather(*flights):
        versions = generation.policy_versions.tolist()
        old = versions.count(1)
        assert versions == [1] * old + [2] * (ENOUGH - old)
        assert old == ENOUGH if pause == "drain" else 0 < old < ENOUGH
        before = recomputed(FIRST, PROMPT, generation)[:old]
        np.testing.assert_allclose(generation.logprobs[:old], before, atol=1e-5)
    sent = await engine.checksums()
    assert (await engine._client.weight_version(), cluster.fetched) == (weights_label(2), 0)
    await engine.load_published(cluster.announce(FIRST, 3))
    assert await engine.checksums() == first
    await engine.load_weights(SECOND.state_dict(), 4)  # by files
    assert await engine.checksums() == sent


async def test_a_learner_that_is_killed_in_mid_broadcast_leaves_the_server_to_load_files(
    in_group, cluster, monkeypatch
):
    engine, receiving = in_group, asyncio.Event()
    await engine.load_published(cluster.announce(FIRST, 1))
    first = await engine.checksums()
    await engine.load_published(cluster.announce(SECOND, 2))
    second, receive = await engine.checksums(), engine._client.receive

    async def noted(*args, **settings):
        receiving.set()
        return await receive(*args, **settings)

    monkeypatch.setattr(engine._client, "receive", noted)
    [group] = cluster.broadcaster._groups.values()
    published = cluster.announce(FIRST, 3)
    begin = published.begin

    async def stopped(offer):
        group.process._process.send_signal(signal.SIGSTOP)  # told to send, it does not
        await begin(offer)

    monkeypatch.setattr(published, "begin", stopped)
    loading = asyncio.create_task(engine.load_published(published))
    await asyncio.wait_for(receiving.wait(), 60.0)
    group.process._process.kill()
    await asyncio.wait_for(loading, 120.0)
    assert (engine.policy_version, engine.failure, cluster.fetched) == (3, "", 1)
    assert await engine.checksums() == first
    monkeypatch.setattr(engine._loading._group, "_not_before_s", 0.0)
    await engine.load_published(cluster.announce(SECOND, 4))  # in another group
    assert (await engine.checksums(), cluster.fetched) == (second, 1)


async def test_prefixes_cached_by_older_weights_are_not_used(engine):
    long = PROMPT * 40
    await engine.generate(request("cached", long, new=4))
    await engine.load_weights(SECOND.state_dict(), 1)
    generation = await engine.generate(request("again", long, new=4))
    np.testing.assert_allclose(generation.logprobs, recomputed(SECOND, long, generation), atol=1e-5)


async def test_what_the_server_found_in_its_cache_and_how_full_that_is_are_known(engine):
    before = engine.work_counts
    prompt = [*range(3, 35)] * 2
    for name in ("first", "again"):
        await engine.generate(request(f"cached-{name}", prompt, new=4))
    found = engine.work_counts.since(before)
    assert (found.prompt_tokens, found.cached_tokens) == (128, 63), (
        "all but the last token, which is computed"
    )
    assert (found.drafted_tokens, found.draft_passes) == (0, 0)
    flight = started(engine, "held")

    async def used():
        return engine.kv_tokens is not None and engine.kv_tokens.used > len(PROMPT)

    await until(used, "a reading of the cache with the request")
    assert engine.kv_tokens.capacity == 65536
    await engine.abort("held")
    await flight


async def test_the_log_says_what_the_start_did_and_has_no_line_for_each_request(engine):
    process = engine._server.process
    said = process._log.read_text()
    shown = {words for sign, words in servers.PHASES.items() if sign in said}
    assert shown >= {"loading the model", "allocating its cache"}
    await engine.generate(request("unlogged", PROMPT, new=4))
    assert "POST /generate" not in process._log.read_text()


async def test_given_tokens_have_the_log_probs_of_the_weights_loaded_last(engine):
    long = [*PROMPT * 4]
    await engine.score([long])  # no prefix that older weights have cached may serve the next ones
    await engine.load_weights(SECOND.state_dict(), 1)
    found = await engine.score([long, PROMPT])
    for tokens, logprobs in zip((long, PROMPT), found, strict=True):
        with torch.inference_mode():
            expected = SECOND(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        expected = expected.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-5)


async def test_abort_returns_the_tokens_so_far(engine):
    flight, other = started(engine, "abort", new=3000), started(engine, "abort-not", new=300)
    await in_flight(engine, flight, other)
    await engine.abort("abort")
    generation = await flight
    assert generation.finish_reason == "abort"
    assert 0 < len(generation.token_ids) < 3000
    assert len(generation.logprobs) == len(generation.policy_versions) == len(generation.token_ids)
    np.testing.assert_allclose(generation.logprobs, recomputed(FIRST, PROMPT, generation), atol=1e-5)
    assert len((await other).token_ids) == 300
    await engine.abort("abort")


async def test_an_abort_right_behind_its_request_is_heard(engine):
    flight = started(engine, "at once", new=3000)
    await asyncio.sleep(0)
    await engine.abort("at once")
    assert (await flight).finish_reason == "abort"


async def test_cancelling_the_caller_ends_the_generation_at_the_worker(engine):
    flight = started(engine, "cancel", new=3000)
    await in_flight(engine, flight)
    flight.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flight

    async def none_runs():
        return await requests_at_the_worker(engine) == 0

    await until(none_runs, "the worker to run nothing", timeout_s=3.0)
    assert (engine.running, engine.waiting) == (0, 0)


async def test_a_generation_that_takes_too_long_is_aborted_at_the_worker(engine, monkeypatch):
    monkeypatch.setattr(engine, "_config", engine._config.model_copy(update={"request_timeout_s": 0.5}))
    with pytest.raises(EngineError, match=r"did not answer within 0\.5 s"):
        await engine.generate(request("slow", PROMPT, new=3500))

    async def none_runs():
        return await requests_at_the_worker(engine) == 0

    await until(none_runs, "the worker to run nothing", timeout_s=3.0)


async def test_bad_requests_and_weights_are_refused_and_leave_the_engine_as_it_was(engine):
    with pytest.raises(EngineError, match="context"):
        await engine.generate(request("too long", [3] * 5000))
    with pytest.raises(EngineError, match="not one of this model"):
        await engine.load_weights({"nonsense": torch.zeros(1)}, 1)
    with pytest.raises(EngineError, match=r"lm_head.weight is torch.float32 \(1,\)"):
        await engine.load_weights({"lm_head.weight": torch.zeros(1)}, 1)
    flight = started(engine, "twice", new=300)
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="already in flight"):
        await engine.generate(request("twice", PROMPT))
    assert len((await flight).token_ids) == 300
    assert engine.policy_version == 0


async def test_a_server_frees_its_device_and_comes_back_with_the_weights_loaded_last(engine):
    before = await engine.checksums()
    await engine.release()
    waiting = started(engine, "meanwhile", new=32)
    assert await engine.load_weights(SECOND.state_dict(), 1) == 0.0
    assert await engine.checksums() == before, "the server is not told while it rests"
    assert (engine.policy_version, engine.waiting, waiting.done()) == (1, 1, False)
    await engine.resume()
    generation = await waiting
    assert set(generation.policy_versions.tolist()) == {1}
    np.testing.assert_allclose(generation.logprobs, recomputed(SECOND, PROMPT, generation), atol=1e-5)
    after = await engine.checksums()
    await engine.release()
    await engine.resume()
    assert await engine.checksums() == after != before


async def test_a_server_is_not_asked_to_free_its_device_while_it_is_at_work(engine):
    flight = started(engine, "busy")
    await in_flight(engine, flight)
    with pytest.raises(EngineError, match="was not idle within"):
        await engine._client.release(0.3)
    assert len((await flight).token_ids) == LONG


async def test_a_generation_outlives_the_turn_of_others_on_the_device(engine, monkeypatch):
    async def lent():
        return None

    async def build():
        return engine

    monkeypatch.setattr(engine, "start", lent)
    monkeypatch.setattr(engine, "close", lent)
    fleet = Fleet({"one": build}, FleetConfig())
    await fleet.start()
    await fleet.load_weights(FIRST.state_dict(), 0)
    task = asyncio.create_task(fleet.generate(request("turns", PROMPT, new=LONG)))
    await in_flight(engine, task)
    await fleet.release()
    assert await requests_at_the_worker(engine) == 0
    await fleet.load_weights(SECOND.state_dict(), 1)
    await fleet.resume()
    generation = await task
    await fleet.close()
    versions = generation.policy_versions.tolist()
    first = versions.count(0)
    assert versions == [0] * first + [1] * (LONG - first)
    assert 0 <= first < LONG
    for model, part in ((FIRST, slice(0, first)), (SECOND, slice(first, LONG))):
        expected = recomputed(model, PROMPT, generation)[part]
        np.testing.assert_allclose(generation.logprobs[part], expected, atol=2e-5)


async def test_logprobs_that_are_not_finite_are_an_error(engine):
    broken = {"model.norm.weight": torch.full((32,), torch.nan)}
    await engine.load_weights(broken, 1)
    with pytest.raises(EngineError, match="request nan: "):
        await engine.generate(request("nan", PROMPT))


async def test_an_engine_may_attach_to_a_server_and_bring_it_to_its_weights(engine, model_dir, tmp_path):
    config = SglangEngineConfig(type="sglang", url=engine._client.url, update="tensor")
    attached = SglangEngine(model_dir, config, tmp_path / "unused.log")
    await engine._client.pause("in_place")  # as an actor leaves it that is killed in an update
    await engine._client._update("/begin_weight_update", {}, 30.0)
    await attached.start()
    await attached.load_weights(SECOND.state_dict(), 7)
    generation = await attached.generate(request("attached", PROMPT, new=16))
    await attached.close()
    assert set(generation.policy_versions.tolist()) == {7}
    np.testing.assert_allclose(generation.logprobs, recomputed(SECOND, PROMPT, generation), atol=1e-5)
    assert not engine._server.process.ended
