"""Several policies at one stand-in of an SGLang server: adapters, versions and requests are its own."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
import torch

from actors.engines.fleet import shared_servers
from actors.engines.fleet.engine_state import EngineState
from actors.engines.fleet.fleet import Fleet
from actors.engines.fleet.shared_servers import SharedServers
from actors.engines.sglang.guest import GuestEngine
from actors.settings.fleet import FleetConfig
from bus.errors import ConfigError, EngineError, WeightsKeptError
from tests.actors.adapters import MODULES, RANK, served
from tests.actors.engines.sglang.adapters_at_stand_in import BASE, LORA, A, B, adapter, asked, begun
from tests.actors.sglang_stand_in import TIMEOUT_S, StandIn

OWN, RIVAL = served(2), replace(served(1), rank=2, scale=0.5, modules=("q_proj",))
OWN, RIVAL = OWN.sharing([RIVAL], "base"), RIVAL.sharing([OWN], "base")
ROOM = {"max_loras_per_batch": 4, "max_loaded_loras": 4}


def rivals(value: float) -> dict[str, torch.Tensor]:
    return {A: torch.full((2, 6), value), B: torch.full((8, 2), value)}


def loaded(server):
    """Policy and version of each adapter that the server has; the run's own policy has no name there."""
    return [("-".join(name.split("-")[5:]), name.split("-")[3]) for name in server.lora.loaded]


def versions_of(generation):
    return set(generation.policy_versions.tolist())


@pytest.fixture
def server(stand_in):
    stand_in.lora.settings = LORA | ROOM
    return stand_in


@pytest.fixture
def host(server, attach):
    async def build(url=None):
        return attach(served=OWN, url=url or server.url, adapter="loaded", stream_interval=0)

    return build


@pytest.fixture
async def both(host):
    """The engine of the run's own policy and that of another at the same server, each with a version."""
    own = await host()
    await own.start()
    rival = GuestEngine(own, "rival", RIVAL)
    await rival.start()
    await own.load_weights(BASE | adapter(0.0), 7)
    await rival.load_weights(BASE | rivals(1.0), 3)
    return own, rival


async def test_the_frozen_weights_come_once_and_each_policy_has_adapters_and_versions_of_its_own(
    server, both
):
    own, rival = both
    assert server.versions == ["7"]
    assert loaded(server) == [("", "v7"), ("rival", "v3")]
    first, second = server.lora.loaded.values()
    assert (first["config_dict"]["r"], second["config_dict"]["r"]) == (RANK, 2)
    assert second["config_dict"]["lora_alpha"] == 1.0, "0.5 times the rank"
    assert torch.equal(second["tensors"][A], rivals(1.0)[A])
    for engine, policy, version in ((own, first, 7), (rival, second, 3)):
        assert versions_of(await begun(engine, "one")) == {version}
        assert server.asked[-1]["lora_path"] == policy["lora_name"]
        assert engine.policy_version == version
        assert engine.tokens_generated == 4


WRONG = {
    "of rank 4, and the server was started for rank 2": {A: torch.ones(4, 6), B: torch.ones(8, 4)},
    r"of shape \[2, 5\], and its weight takes \[2, 6\]": {A: torch.ones(2, 5)},
    r"of shape \[9, 2\], and its weight takes \[8, 2\]": {B: torch.ones(9, 2)},
    "belongs to none of the frozen weights": {A.replace("q_proj", "o_proj"): torch.ones(2, 6)},
}


@pytest.mark.parametrize("reason", WRONG)
async def test_an_adapter_that_does_not_fit_is_kept_from_the_server_and_all_policies_go_on(
    server, both, reason
):
    own, rival = both
    server.running.clear()
    theirs, ours = begun(rival, "theirs"), begun(own, "ours")
    await asked(server, 2)
    with pytest.raises(WeightsKeptError, match=f"of policy 'rival' .*{reason}"):
        await rival.load_weights(WRONG[reason], 4)
    assert not own.failure
    server.running.set()
    assert versions_of(await ours) == {7}
    assert versions_of(await theirs) == {3}
    assert loaded(server) == [("", "v7"), ("rival", "v3")]
    await rival.load_weights(rivals(2.0), 5)
    assert versions_of(await begun(rival, "later")) == {5}


async def test_of_the_runs_own_policy_too_a_version_that_does_not_fit_leaves_the_server_to_all(server, both):
    own, rival = both
    with pytest.raises(WeightsKeptError, match="of the run's own policy is of rank 2"):
        await own.load_weights(rivals(1.0), 8)
    assert versions_of(await begun(own, "ours")) == {7}
    assert versions_of(await begun(rival, "theirs")) == {3}


async def test_a_policy_has_a_window_of_its_own_and_requests_of_the_other_go_on(server, both):
    own, rival = both
    server.running.clear()
    theirs, ours = begun(rival, "theirs"), begun(own, "ours")
    await asked(server, 2)
    assert (own.running, rival.running) == (1, 1)
    assert (own.requests_of_others, rival.requests_of_others) == (1, 1)
    await own.load_weights(adapter(1.0), 8)
    assert loaded(server) == [("", "v7"), ("rival", "v3"), ("", "v8")]
    await asyncio.wait_for(rival.load_weights(rivals(2.0), 4), TIMEOUT_S)
    ended = await asyncio.wait_for(theirs, TIMEOUT_S)
    assert (ended.finish_reason, versions_of(ended)) == ("abort", {3})
    assert loaded(server) == [("", "v7"), ("", "v8"), ("rival", "v4")]
    assert not ours.done()
    server.running.set()
    assert versions_of(await ours) == {7}
    assert versions_of(await begun(rival, "later")) == {4}


async def test_a_server_that_was_started_again_gets_the_adapters_of_all_policies(server, both):
    own, rival = both
    server.weights, server.version, server.lora.loaded = {}, "default", {}
    await rival.load_weights(rivals(2.0), 4)
    assert server.weights.keys() == BASE.keys()
    assert loaded(server) == [("rival", "v4"), ("", "v7")]
    assert torch.equal([*server.lora.loaded.values()][-1]["tensors"][A], adapter(0.0)[A])
    assert versions_of(await begun(own, "ours")) == {7}
    assert versions_of(await begun(rival, "theirs")) == {4}


async def test_requests_of_a_policy_wait_for_its_own_first_version(server, host):
    own = await host()
    await own.start()
    rival = GuestEngine(own, "rival", RIVAL)
    await rival.start()
    await own.load_weights(BASE | adapter(0.0), 7)
    waiting = begun(rival, "early")
    assert versions_of(await begun(own, "ours")) == {7}
    assert (rival.waiting, own.waiting, rival.policy_version) == (1, 0, -1)
    await rival.load_weights(BASE | rivals(1.0), 3)
    assert versions_of(await asyncio.wait_for(waiting, TIMEOUT_S)) == {3}


async def test_the_policy_that_comes_first_brings_the_frozen_weights(server, host):
    own = await host()
    await own.start()
    rival = GuestEngine(own, "rival", RIVAL)
    await rival.start()
    await rival.load_weights(BASE | rivals(1.0), 3)
    await own.load_weights(BASE | adapter(0.0), 7)
    assert server.versions == ["3"]
    assert versions_of(await begun(own, "ours")) == {7}
    assert versions_of(await begun(rival, "theirs")) == {3}


async def test_a_policy_that_leaves_ends_its_own_requests_alone_and_may_come_again(server, both):
    own, rival = both
    server.running.clear()
    theirs, ours = begun(rival, "theirs"), begun(own, "ours")
    await asked(server, 2)
    await rival.close()
    with pytest.raises(EngineError, match="the policy is served no more"):
        await asyncio.wait_for(theirs, TIMEOUT_S)
    with pytest.raises(EngineError, match="engine of policy 'rival' was not started, or is closed"):
        await rival.generate(None)
    server.running.set()
    assert versions_of(await ours) == {7}
    again = GuestEngine(own, "rival", RIVAL)
    await again.start()
    assert (again.policy_version, again.tokens_generated) == (-1, 0)
    await again.load_weights(BASE | rivals(1.0), 3)
    assert loaded(server) == [("", "v7"), ("rival", "v3")], "that of the guest before was unloaded"
    assert versions_of(await begun(again, "later")) == {3}


async def test_a_server_without_room_for_all_policies_is_refused_with_the_flags_for_all(server, host):
    server.lora.settings |= {"max_loaded_loras": 3}
    with pytest.raises(ConfigError, match=r"has max_loaded_loras=3, and 4 are needed: .*loaded-loras 4"):
        await (await host()).start()
    assert OWN.room == RIVAL.room
    assert (OWN.room.rank, OWN.room.modules, OWN.room.slots) == (RANK, MODULES, 4)


@pytest.fixture
async def fleets(host, monkeypatch):
    """The fleets of both policies at the server."""
    monkeypatch.setattr(shared_servers, "FIRST_WAIT_S", 0.05)
    shared, quick = SharedServers(OWN, {"rival": RIVAL}), FleetConfig(backoff_s=0.01)
    own = Fleet(shared.hosts({"one": host}), quick)
    rival = Fleet(shared.guests("rival"), quick)
    shared.admit("rival", rival)
    yield own, rival, shared
    await rival.close()
    await own.close()


async def test_when_the_engine_of_a_server_fails_all_policies_go_on_at_the_next_one(server, fleets):
    own, rival, _ = fleets
    await own.start()
    await rival.start()
    await own.load_weights(BASE | adapter(0.0), 7)
    await rival.load_weights(BASE | rivals(1.0), 3)
    server.weights, server.version, server.lora.loaded = {}, "default", {}
    found = await asyncio.wait_for(asyncio.gather(begun(rival, "theirs"), begun(own, "ours")), TIMEOUT_S)
    assert [versions_of(one) for one in found] == [{3}, {7}]
    assert sorted(loaded(server)) == [("", "v7"), ("rival", "v3")]
    assert server.weights.keys() == BASE.keys()
    assert own.engines["one"]["restarts"] == 1


async def test_no_request_is_blamed_where_the_server_had_one_of_another_policy_too(server, both):
    own, rival = both
    server.running.clear()
    both_ask = [begun(own, "ours"), begun(rival, "theirs")]
    await asked(server, 2)
    await own._fail("it is gone")
    await asyncio.wait(both_ask, timeout=TIMEOUT_S)
    assert all(isinstance(one.exception(), EngineError) for one in both_ask)
    assert (own.requests_of_others, rival.requests_of_others) == (1, 1), "as when it failed"
    assert EngineState(own).suspects(asked=1) == EngineState(rival).suspects(asked=1) == 2
    with pytest.raises(EngineError, match="it is gone"):
        await rival.check_health()


async def test_a_guest_waits_for_a_server_that_is_not_up_but_not_long_the_first_time(fleets):
    own, rival, _ = fleets
    with pytest.raises(EngineError, match="one of the run's own policy, which serves this too, is not up"):
        await rival.start()
    assert own.engines["one"]["state"] == "starting"


async def test_servers_that_join_and_leave_do_so_for_all_policies(server, host, fleets):
    own, rival, shared = fleets
    await own.start()
    await rival.start()
    second = StandIn()
    second.lora.settings = LORA | ROOM
    await second.start()

    own.join("two", shared.hosts({"two": partial(host, second.url)})["two"])
    shared.joined("two")
    assert list(rival.engines) == ["one", "two"]
    await own.load_weights(BASE | adapter(0.0), 7)
    await rival.load_weights(BASE | rivals(1.0), 3)
    async with asyncio.timeout(TIMEOUT_S):
        while sorted(loaded(second)) != [("", "v7"), ("rival", "v3")]:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    await shared.leave("two")
    await own.leave("two")
    assert list(rival.engines) == list(own.engines) == ["one"]
    assert versions_of(await begun(rival, "theirs")) == {3}
    await second.close()
