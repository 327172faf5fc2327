"""What becomes of requests at a server that takes new weights, and what is recorded of their tokens."""

import asyncio
from dataclasses import replace

import pytest

from actors.engines.sglang.client.answers import Streamed
from actors.engines.sglang.client.server_facts import ServerFacts
from actors.engines.sglang.client.weight_labels import weights_label
from actors.engines.sglang.engine import load_paused
from actors.engines.sglang.requests_in_progress import RequestsInProgress
from actors.engines.sglang.served_policy import ServedPolicy
from actors.settings.engines import SglangEngineConfig
from bus.errors import ConfigError
from tests.actors.engines.sglang.streamed_pieces import piece
from tests.actors.sglang_stand_in import STATE, TIMEOUT_S
from tests.actors.tiny import request


def facts_of(version="0.5.23", **settings) -> ServerFacts:
    return ServerFacts(
        version=version, model="m", update_sessions=True, reports_spans=True, returns_experts=False,
        streams=True, tensor_ranks=1, settings=(settings,),
    )  # fmt: skip


class Server:
    """Ends a request when its abort comes; `said` is what it was asked for, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    async def abort(self, rid):
        self.said.append(f"abort {rid.rpartition('-')[2]}")
        self.ends[rid].set()

    async def pause(self, mode):
        self.said.append(f"pause {mode}")

    async def resume(self):
        self.said.append("resume")


@pytest.mark.parametrize("pause", ["in_place", "retract"])
async def test_a_request_that_waits_is_ended_before_the_server_takes_weights(pause):
    server = Server()
    flights, policy = RequestsInProgress(lambda: server), ServedPolicy()
    with (
        flights.new(request("waits", [1]), policy) as waits,
        flights.new(request("begun", [1]), policy) as begun,
        flights.new(request("hidden", [1]), policy) as hidden,
    ):
        waits.streamed, begun.streamed = Streamed(waits.request, 1), Streamed(begun.request, 1)
        begun.streamed.add(piece(0, 1))
        for flight in (waits, begun, hidden):
            ended = server.ends[flight.rid] = asyncio.Event()
            flight.sent = asyncio.create_task(ended.wait())

        async def load(flush, end_s):
            server.said.append(f"load, flush {flush}")
            assert waits.sent.done() == (not flush), "with a flush nothing of old weights is left to be found"
            return 2

        config = SglangEngineConfig(pause=pause)
        version, _ = await asyncio.wait_for(load_paused(load, server, facts_of(), config, flights), TIMEOUT_S)
        assert version == 2
        aborts = ["abort waits"] if pause == "in_place" else []
        flush = pause == "retract"
        assert server.said == [*aborts, f"pause {pause}", f"load, flush {flush}", "resume"]
        assert (waits.interrupted, begun.sent.done(), hidden.sent.done()) == (True, False, False)
        for flight in (waits, begun, hidden):
            flight.sent.cancel()


@pytest.mark.parametrize(("pause", "keeps"), [("in_place", True), ("retract", False)])
async def test_tokens_after_an_update_say_whose_keys_and_values_they_looked_at(
    stand_in, attach, pause, keeps, monkeypatch
):
    spans = [
        {"version": weights_label(3), "start": 0, "end": 2},
        {"version": weights_label(4), "start": 2, "end": 5},
    ]
    generated = stand_in._generated

    def straddling(count, end="length"):
        answer = generated(count, end)
        if count == 5:
            answer["meta_info"]["weight_versions"] = spans
        return answer

    monkeypatch.setattr(stand_in, "_generated", straddling)
    engine = attach(pause=pause)
    await engine.start()
    await engine.load_weights(STATE, 3)
    stand_in.running.clear()
    flight = asyncio.create_task(engine.generate(request("straddles", [1], new=5)))
    async with asyncio.timeout(TIMEOUT_S):
        while not stand_in.asked or stand_in.asked[-1]["sampling_params"]["max_new_tokens"] != 5:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    await engine.load_weights(STATE, 4)
    found = await asyncio.wait_for(flight, TIMEOUT_S)
    assert found.policy_versions.tolist() == [3, 3, 4, 4, 4]
    assert (found.kv_versions.tolist() if keeps else found.kv_versions) == ([3] * 5 if keeps else None)
    later = await engine.generate(request("later", [1], new=2))
    assert (later.policy_versions.tolist(), later.kv_versions) == ([4, 4], None)
    assert stand_in.asked[-2]["extra_key"] != stand_in.asked[-1]["extra_key"]


def test_stored_prefixes_that_older_weights_may_have_computed_are_refused():
    facts_of("0.5.19", enable_hierarchical_cache=True).refuse_stored_prefixes("in_place", "http://x")
    stored = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}
    facts_of("0.5.20", **stored).refuse_stored_prefixes("in_place", "http://x")
    with pytest.raises(ConfigError, match=r"http://x is SGLang 0\.5\.19 with hicache_storage_backend"):
        facts_of("0.5.19", **stored).refuse_stored_prefixes("in_place", "http://x")
    with pytest.raises(ConfigError, match=r"http://x is SGLang 0\.5\.23 with enable_flexkv"):
        facts_of(enable_flexkv=True).refuse_stored_prefixes("drain", "http://x")
    with pytest.raises(ConfigError, match=r"pause=retract: the server at http://x has hicache_storage_back"):
        facts_of(**stored).refuse_stored_prefixes("retract", "http://x")


def test_servers_that_end_at_an_update_which_retracts_are_refused():
    for pause, version in (("retract", "0.5.21"), ("in_place", "0.5.19"), ("drain", "0.5.19")):
        facts_of(version).refuse_retraction(pause, "http://x")
    replace(facts_of("0.5.18"), reports_spans=False).refuse_retraction("retract", "http://x")
    with pytest.raises(ConfigError, match=r"http://x is SGLang 0\.5\.20, which ends .* use 0\.5\.21"):
        facts_of("0.5.20").refuse_retraction("retract", "http://x")
