"""One engine over two real SGLang servers on this machine's CPU, a prefill and a decode server."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from actors.engines.base import InterruptedGenerationError
from actors.engines.sglang import pair_client as sglang_pair_client
from actors.engines.sglang.engine import SglangEngine
from actors.engines.sglang.server.server import group_members
from actors.settings.engines import SglangEngineConfig
from bus.errors import EngineError, RequestRefusedError
from tests.actors.sglang_served import CONFIG, FIRST, LONG, PROMPT, SECOND, noted, started
from tests.actors.tiny import recomputed, request

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.nightly,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(420),
]

PAIR = {
    "enabled": True,
    "transfer": "mooncake_tcp",
    "prefill": {"chunked_prefill_size": 512},
    "decode": {"hicache_ratio": 2.0},  # without one it wants 10 GiB of free memory
}
LIMIT_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory) -> AsyncIterator[SglangEngine]:
    """One pair for all tests of this module."""
    model_dir, log_file = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("log") / "engine.log"
    FIRST.config.save_pretrained(model_dir)
    engine = SglangEngine(model_dir, SglangEngineConfig(**CONFIG, disaggregation=PAIR), log_file)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
    assert [group_members(group) for group in groups_of(engine)] == [[], []]


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared) -> SglangEngine:
    """The shared pair with the first policy as version 0."""
    await shared.load_weights(FIRST.state_dict(), 0)
    return shared


def groups_of(engine) -> list[int]:
    return [server.process.pid for server in (engine._server.prefill, engine._server.decode)]


async def handed_out(engine, name, more_than=0) -> int:
    """Return when the engine knows of so many tokens of a request in flight; how many there are."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            flight = engine.in_progress._in_progress.get(name)
            tokens = len(flight.streamed._token_ids) if flight and flight.streamed else 0
            if tokens > more_than:
                return tokens
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_of_both_servers_equal_those_of_transformers(engine, temperature):
    generation = await engine.generate(request("parity", PROMPT, new=64, temperature=temperature))
    assert (len(generation.token_ids), generation.finish_reason) == (64, "length")
    assert set(generation.policy_versions.tolist()) == {0}
    expected = recomputed(FIRST, PROMPT, generation, temperature)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)


async def test_a_single_token_is_the_prefill_servers(engine):
    generation = await engine.generate(request("one", PROMPT, new=1))
    assert (len(generation.token_ids), generation.finish_reason) == (1, "length")
    np.testing.assert_allclose(generation.logprobs, recomputed(FIRST, PROMPT, generation), atol=1e-5)


async def test_a_prompt_that_no_server_takes_is_refused(engine):
    with pytest.raises(RequestRefusedError, match="longer than the model's context"):
        await engine.generate(request("long", [3] * 5000, new=4))


@pytest.mark.parametrize("update", ["disk", "tensor"])
async def test_weights_arrive_in_both(engine, update, monkeypatch):
    monkeypatch.setattr(engine, "_config", engine._config.model_copy(update={"update": update}))
    before = await engine.checksums()
    await engine.load_weights(SECOND.state_dict(), 1)
    after = await engine.checksums()
    assert all(after[name] != before[name] for name in before if "norm" not in name and "cos_sin" not in name)
    assert all(after[f"prefill.{name}"] == after[name] for name in after if not name.startswith("prefill."))
    generation = await engine.generate(request("after", PROMPT, new=8))
    assert set(generation.policy_versions.tolist()) == {1}
    np.testing.assert_allclose(generation.logprobs, recomputed(SECOND, PROMPT, generation), atol=1e-5)
    moved = {name: tensor.clone() for name, tensor in SECOND.state_dict().items()}
    for tensor in moved.values():
        tensor.view(-1)[3] += 1
    ways = []
    monkeypatch.setattr(engine._client, "load_changes", noted(engine._client.load_changes, ways, "changes"))
    await engine.load_weights(moved, 2)
    assert ways == (["changes"] if update == "disk" else [])
    partly = await engine.checksums()
    assert all(partly[name] != after[name] for name in after if "cos_sin" not in name)
    await engine.load_weights(SECOND.state_dict(), 3)
    assert await engine.checksums() == after


async def test_versions_are_exact_across_an_update_in_flight(engine):
    names = [f"mid-{n}" for n in range(3)]
    flights = [started(engine, name, new=3000) for name in names]
    for name in names:
        await handed_out(engine, name)
    await engine.load_weights(SECOND.state_dict(), 1)
    late = await engine.generate(request("late", PROMPT, new=8))
    assert set(late.policy_versions.tolist()) == {1}
    np.testing.assert_allclose(late.logprobs, recomputed(SECOND, PROMPT, late), atol=1e-5)
    for name in names:
        await handed_out(engine, name, more_than=await handed_out(engine, name))
    await asyncio.gather(*map(engine.abort, names))
    for generation in await asyncio.gather(*flights):
        versions = generation.policy_versions.tolist()
        old = versions.count(0)
        assert 0 < old < len(versions)
        assert versions == [0] * old + [1] * (len(versions) - old)
        before = recomputed(FIRST, PROMPT, generation)[:old]
        np.testing.assert_allclose(generation.logprobs[:old], before, atol=1e-5)


async def test_with_drain_an_update_waits_for_what_is_in_flight(engine, monkeypatch):
    monkeypatch.setattr(engine, "_config", engine._config.model_copy(update={"pause": "drain"}))
    flights = [started(engine, f"drained-{n}", new=100) for n in range(3)]
    await asyncio.sleep(0)
    await engine.load_weights(SECOND.state_dict(), 1)
    for generation in await asyncio.gather(*flights):
        assert generation.policy_versions.tolist() == [0] * 100
    assert (await engine.generate(request("late", PROMPT, new=2))).policy_versions.tolist() == [1, 1]


async def test_a_prompt_that_is_handed_over_while_weights_change_has_tokens_of_both_versions(engine):
    """The decode server takes the first token for its own, drawn with what it has by then."""
    client, prompt = engine._client, np.random.default_rng(2).integers(0, 40, 3500).tolist()
    for attempt in range(20):
        flight = started(engine, f"crossing-{attempt}", prompt[attempt:], new=8)
        async with asyncio.timeout(LIMIT_S):
            while not client._asked:  # noqa: ASYNC110 - nothing tells that it was sent
                await asyncio.sleep(0)
            await asyncio.sleep(0.02 * attempt)  # the decode server must have made room for it, and no more
        await client.decode.pause("in_place")
        if crossing := list(client._asked.values()):
            done, _ = await asyncio.wait({crossing[0].first}, timeout=2.0)
            if done and not flight.done():
                break
        await client.decode.resume()
        await asyncio.wait_for(flight, LIMIT_S)
    else:
        pytest.fail("no prompt was met on its way from one server to the other")
    await engine.load_weights(SECOND.state_dict(), 1)
    generation = await asyncio.wait_for(flight, LIMIT_S)
    old = generation.policy_versions.tolist().count(0)
    assert old > 0
    assert generation.policy_versions.tolist() == [0] * old + [1] * (8 - old)
    expected = recomputed(FIRST, prompt[attempt:], generation)[:old]
    np.testing.assert_allclose(generation.logprobs[:old], expected, atol=1e-5)


async def test_first_tokens_are_of_the_version_that_drew_them_wherever_an_update_meets_them(engine):
    """Updates come while prompts are computed, handed over and decoded."""
    policies, rng = [FIRST, SECOND], np.random.default_rng(0)
    prompts = [rng.integers(0, 40, 600).tolist() for _ in range(12)]  # float32 of 1,500: off by 1.9e-5
    flights = []
    for version in range(1, 5):
        flights += [
            started(engine, f"{version}-{n}", prompt, new=40) for n, prompt in enumerate(prompts[version::4])
        ]
        await asyncio.sleep(0)
        await engine.load_weights(policies[version % 2].state_dict(), version)
    for flight, prompt in zip(flights, [p for v in range(1, 5) for p in prompts[v::4]], strict=True):
        generation = await asyncio.wait_for(flight, LIMIT_S)
        versions = generation.policy_versions
        assert (len(versions), generation.finish_reason) == (40, "length")
        assert (np.diff(versions) >= 0).all()
        drew = recomputed(policies[versions[0] % 2], prompt, generation)
        same = versions == versions[0]
        np.testing.assert_allclose(generation.logprobs[same], drew[same], atol=1e-5)


async def test_prompts_that_are_not_through_when_weights_change_begin_again(engine, monkeypatch):
    monkeypatch.setattr(sglang_pair_client, "HAND_OVER_S", 0.0)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 40, 300).tolist() for _ in range(8)]  # float32 of 3,000 is off by up to 2.4e-5
    client = engine._client
    await client.prefill.pause("in_place")  # so that none is through
    heard: Counter[str] = Counter()

    async def abort(rid: str, ended=client.decode.abort) -> None:
        await ended(rid)
        heard[rid] += 1

    monkeypatch.setattr(client.decode, "abort", abort)
    flights = [started(engine, f"again-{n}", prompt, new=4) for n, prompt in enumerate(prompts)]
    async with asyncio.timeout(LIMIT_S):
        while sum(asked.crossing for asked in client._asked.values()) < len(flights):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        update = asyncio.create_task(engine.load_weights(SECOND.state_dict(), 1))
        # An abort that comes before its request is not heard: the second one surely comes behind it.
        while not all(asked.rest.done() or heard[rid] > 1 for rid, asked in client._asked.items()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await client.prefill.resume()
        await update
        generations = await asyncio.gather(*flights)
    assert not client._asked
    for generation, prompt in zip(generations, prompts, strict=True):
        assert generation.policy_versions.tolist() == [1] * 4
        np.testing.assert_allclose(generation.logprobs, recomputed(SECOND, prompt, generation), atol=1e-5)


async def test_a_pair_that_reports_no_versions_ends_its_requests_before_an_update(engine, monkeypatch):
    monkeypatch.setattr(engine, "_facts", replace(engine._facts, reports_spans=False))
    flights = [started(engine, "decoded")]
    await handed_out(engine, "decoded")
    rng = np.random.default_rng(3)
    prompts = [PROMPT, *(rng.integers(0, 40, 3000).tolist() for _ in range(6))]
    flights += [started(engine, f"prompt-{n}", prompt, new=8) for n, prompt in enumerate(prompts[1:])]
    await asyncio.sleep(0)
    await engine.load_weights(SECOND.state_dict(), 1)
    for flight, prompt in zip(flights, prompts, strict=True):
        generation = await asyncio.wait_for(flight, LIMIT_S)
        [version] = set(generation.policy_versions.tolist())
        expected = recomputed([FIRST, SECOND][version], prompt, generation)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)
        if prompt is PROMPT:
            assert (version, generation.finish_reason) == (0, "abort")


async def test_an_abort_ends_a_request_at_both_servers(engine):
    flight = started(engine, "cut")
    await handed_out(engine, "cut")
    await engine.abort("cut")
    generation = await asyncio.wait_for(flight, LIMIT_S)
    assert generation.finish_reason == "abort"
    assert 0 < len(generation.token_ids) < LONG
    np.testing.assert_allclose(generation.logprobs, recomputed(FIRST, PROMPT, generation), atol=1e-5)
    early = [started(engine, f"early-{n}", [n + 3] * 2000) for n in range(6)]
    await asyncio.sleep(0.01)
    await asyncio.wait_for(asyncio.gather(*(engine.abort(f"early-{n}") for n in range(6))), LIMIT_S)
    for generation in await asyncio.gather(*early):
        assert generation.finish_reason == "abort"
    again = await engine.generate(request("after", PROMPT, new=8))
    np.testing.assert_allclose(again.logprobs, recomputed(FIRST, PROMPT, again), atol=1e-5)


async def test_a_prefill_server_that_dies_ends_the_pair_and_what_was_decoded_is_kept(engine):
    """The last one here: no test has a pair after it."""
    flight = started(engine, "kept", new=3000)
    await handed_out(engine, "kept")
    engine._server.prefill.process._process.kill()
    with pytest.raises(
        InterruptedGenerationError, match="its prefill server: it ended with signal SIGKILL"
    ) as cut:
        await asyncio.wait_for(flight, LIMIT_S)
    kept = cut.value.partial
    assert set(kept.policy_versions.tolist()) == {0}
    np.testing.assert_allclose(kept.logprobs, recomputed(FIRST, PROMPT, kept), atol=1e-5)
    with pytest.raises(EngineError, match="has stopped"):
        await engine.check_health()
    await engine.close()
    assert [group_members(group) for group in groups_of(engine)] == [[], []]
