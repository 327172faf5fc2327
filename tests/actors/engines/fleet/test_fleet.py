"""Many engines behind one: places, failures and partial rollouts, on a virtual clock."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from actors.engines.base import Generation
from actors.engines.fleet.fleet import Fleet
from actors.engines.fleet.pending_request import sound
from actors.settings.actors import ActorsConfig
from actors.settings.engines import SglangEngineConfig
from actors.settings.fleet import FleetConfig
from bus.errors import ConfigError, EngineError, EngineLostError, RequestRefusedError
from tests.actors.engines.fleet.virtual_fleet import Yard, is_right, virtual
from tests.actors.paced_engine import chain
from tests.actors.tiny import request


@virtual
async def test_requests_go_to_the_least_busy_engine_and_wait_in_order_when_all_are_full():
    async with Yard(2, requests_per_engine=2) as yard:
        tasks = [yard.ask(str(n), prompt=[n], new=10) for n in range(7)]
        await asyncio.sleep(5)
        assert [yard.engine(name).running for name in ("e0", "e1")] == [2, 2]
        assert (yard.fleet.running, yard.fleet.waiting) == (4, 3)
        await asyncio.sleep(10)
        assert [task.done() for task in tasks] == [True] * 4 + [False] * 3
        await asyncio.gather(*tasks)
        assert max(engine.most_at_once for engine in yard.all()) == 2
        assert yard.fleet.tokens_generated == 70


@virtual
async def test_a_full_engine_gives_places_away_together_and_none_starves():
    async with Yard(1, requests_per_engine=8, refill=0.5, token_s=1.0) as yard:
        early = [yard.ask(f"early-{n}", new=10 * (n + 1)) for n in range(8)]
        late = [yard.ask(f"late-{n}", new=10) for n in range(5)]
        await asyncio.sleep(35)
        assert (sum(task.done() for task in early), yard.engine("e0").running) == (3, 5)
        await asyncio.sleep(10)
        assert (sum(task.done() for task in early), yard.engine("e0").running) == (4, 8)
        await asyncio.gather(*early, *late)


@virtual
async def test_a_later_turn_goes_where_its_beginning_is_cached():
    async with Yard(3, affinity_slack=2) as yard:
        prompt = list(range(1, 65))
        first = await yard.ask("turn-1", prompt)
        [home] = [e for e in yard.all() if e.requests]
        await asyncio.gather(*(yard.ask(str(n), [n]) for n in range(3)))  # each engine has served one since
        busy = yard.ask("other", [*prompt[:40], 9], new=50)
        await asyncio.sleep(1)
        later = yard.ask("turn-2", [*prompt, *first.token_ids.tolist(), 7, 8])
        await asyncio.sleep(1)
        assert yard.engine_of("other") is home
        assert yard.engine_of("turn-2") is home
        await asyncio.gather(busy, later)


@virtual
async def test_a_much_busier_engine_loses_its_affinity():
    async with Yard(2, affinity_slack=2) as yard:
        prompt = list(range(1, 65))
        tasks = [yard.ask(str(n), [*prompt, n], new=20) for n in range(8)]
        await asyncio.sleep(1)
        assert sorted(engine.running for engine in yard.all()) == [3, 5]
        await asyncio.gather(*tasks)


@virtual
async def test_a_request_that_fits_no_engine_is_refused_and_the_engines_are_well():
    yard = Yard(2)
    yard.contexts = {"e0": 20, "e1": 40}
    async with yard:
        is_right(await yard.ask("long", [1, 2, 3], new=30), [1, 2, 3], 30)
        assert not yard.engine("e0").requests
        with pytest.raises(RequestRefusedError, match="exceeds the context of"):
            await yard.ask("longer", [1, 2, 3], new=50)
        assert all(len(engines) == 1 for engines in yard.built.values())


@virtual
async def test_a_request_goes_on_from_its_tokens_when_its_engine_dies():
    async with Yard(2) as yard:
        task = yard.ask("a", new=10)
        await asyncio.sleep(4.5)
        dying = yard.engine_of("a")
        dying.crash()
        is_right(await task)
        [other] = [e for e in yard.all() if e is not dying and e.requests]
        [rest] = other.requests
        assert (len(rest.token_ids), rest.sampling.max_new_tokens) == (2 + 4, 6)
        assert dying.closed


@virtual
async def test_tokens_that_die_with_their_engine_are_sampled_again():
    async with Yard(2, keeps=False) as yard:
        task = yard.ask("a", new=10)
        await asyncio.sleep(4.5)
        yard.engine_of("a").crash()
        is_right(await task)
        assert yard.fleet.tokens_generated == 14


@virtual
async def test_an_engine_that_hangs_is_found_by_its_health_check_and_replaced():
    async with Yard(2, health_period_s=5, health_timeout_s=10, drain_timeout_s=3) as yard:
        task = yard.ask("a", new=10)
        await asyncio.sleep(4.5)
        hung = yard.engine_of("a")
        hung.hang()
        is_right(await task)
        assert asyncio.get_running_loop().time() < 40
        assert hung.closed
        assert not hung.working


@virtual
async def test_a_generation_that_takes_too_long_is_interrupted_and_goes_on():
    async with Yard(2, request_timeout_s=4.5, attempts=1) as yard:
        is_right(await yard.ask("a", new=10))
        assert sorted(len(r.token_ids) for e in yard.all() for r in e.requests) == [2, 6, 10]
        assert len(yard.all()) == 2


@virtual
async def test_an_engine_that_fails_too_often_is_given_up_and_the_others_go_on():
    async with Yard(2, restarts=2, backoff_s=1) as yard:
        yard.broken = True
        yard.engine("e0").crash()
        with pytest.raises(EngineError, match="crashed"):
            await yard.engine("e0").check_health()
        await asyncio.sleep(60)
        assert yard.fleet.engines["e0"]["state"] == "given up"
        is_right(await yard.ask("a"))
        yard.broken = False
        await yard.fleet.leave("e0")
        yard.fleet.join("e0", yard.build("e0"))
        await asyncio.sleep(1)
        assert yard.fleet.engines["e0"]["state"] == "serving"


@virtual
async def test_without_any_engine_left_everybody_hears_it():
    async with Yard(2, restarts=1, requests_per_engine=1) as yard:
        waiting = [yard.ask(str(n)) for n in range(4)]
        await asyncio.sleep(1)
        yard.broken = True
        for engine in yard.all():
            engine.crash("out of memory")
        for task in waiting:
            with pytest.raises(EngineLostError, match="all engines failed more than 1 times"):
                await task
        with pytest.raises(EngineLostError):
            await yard.fleet.load_weights({}, 2)
        assert yard.fleet.failure.endswith("the last: no memory left")


@virtual
async def test_a_fleet_that_cannot_start_says_why():
    yard = Yard(2)
    yard.broken = True
    with pytest.raises(EngineError, match=r"none of 2 engines could start: .*no memory"):
        await yard.fleet.start()


@virtual
async def test_settings_with_which_no_engine_starts_are_reported_as_such():
    async def build():
        raise ConfigError("no flag is named memory")

    with pytest.raises(ConfigError, match="no flag is named memory"):
        await Fleet({"one": build}, FleetConfig()).start()


def test_one_url_is_not_several_engines():
    with pytest.raises(ValueError, match="each URL is an engine"):
        ActorsConfig(engine=SglangEngineConfig(url="http://host:1"), fleet=FleetConfig(engines=2))


@pytest.mark.parametrize("limit", ["start_timeout_s", "update_timeout_s"])
def test_an_engines_limit_that_the_fleets_would_hide_is_refused(limit):
    ActorsConfig(engine=SglangEngineConfig())
    engine = SglangEngineConfig(**{limit: 5.0})
    ActorsConfig(engine=engine, fleet=FleetConfig(**{limit: 95.0}))
    says = rf"engine\.{limit}=5 and 90 s .* more than fleet\.{limit}=94: .* raise the fleet's to 95"
    with pytest.raises(ValueError, match=says):
        ActorsConfig(engine=engine, fleet=FleetConfig(**{limit: 94.0}))


@virtual
async def test_a_request_that_kills_its_engines_fails_alone():
    async with Yard(2, attempts=2, backoff_s=0.1) as yard:
        task = yard.ask("poison", new=10)
        for _ in range(2):
            await asyncio.sleep(2.5)
            yard.engine_of("poison").crash("segmentation fault")
        with pytest.raises(EngineError, match="failed 2 times"):
            await task
        is_right(await yard.ask("a"))


@virtual
async def test_an_abort_returns_the_tokens_so_far_also_in_the_queue():
    async with Yard(1, requests_per_engine=1) as yard:
        running, queued = yard.ask("a"), yard.ask("b")
        await asyncio.sleep(3.5)
        await yard.fleet.abort("b")
        await yard.fleet.abort("a")
        await yard.fleet.abort("nobody")
        first, second = await running, await queued
        assert (first.finish_reason, first.token_ids.tolist()) == ("abort", chain([5, 6], 3))
        assert (second.finish_reason, second.token_ids.tolist()) == ("abort", [])


@virtual
async def test_cancelling_the_caller_ends_the_request_at_its_engine_and_in_the_queue():
    async with Yard(1, requests_per_engine=1) as yard:
        tasks = [yard.ask(str(n)) for n in range(3)]
        await asyncio.sleep(3.5)
        for task in tasks[:2]:
            task.cancel()
        await asyncio.wait(tasks[:2])
        assert next(iter(yard.engine("e0").working)).endswith("-2")
        assert yard.fleet.waiting == 0
        is_right(await tasks[2])


@virtual
async def test_closing_fails_what_is_in_flight():
    yard = Yard(1, requests_per_engine=1)
    async with yard:
        tasks = [yard.ask(str(n)) for n in range(2)]
        await asyncio.sleep(2.5)
    for task in tasks:
        with pytest.raises(EngineError, match="was closed"):
            await task
    with pytest.raises(EngineError, match="was closed"):
        await yard.ask("later")


@virtual
async def test_what_is_no_generation_is_tried_again_at_an_engine_that_is_well():
    async with Yard(1) as yard:
        engine = yard.engine("e0")
        task = yard.ask("a", new=3)
        await asyncio.sleep(2.5)
        engine.working[next(iter(engine.working))].versions.append(1)
        is_right(await task, new=3)
        assert len(engine.requests) == 2
        assert yard.all() == [engine]


@pytest.mark.parametrize(
    "wrong", [{"token_ids": [-1]}, *({"logprobs": [nats]} for nats in (0.5, -2e4, -np.inf, np.nan))]
)
@virtual
async def test_tokens_that_no_engine_can_have_drawn_are_drawn_again(wrong):
    async with Yard(1) as yard:
        engine, generate = yard.engine("e0"), yard.engine("e0").generate

        async def forged(request):
            engine.generate = generate
            drawn = await generate(request)
            return replace(drawn, **{name: np.array(values) for name, values in wrong.items()})

        engine.generate = forged
        is_right(await yard.ask("a", new=1), new=1)
        assert len(engine.requests) == 2


@virtual
async def test_an_engine_that_fails_one_request_after_the_other_is_replaced_though_it_feels_well():
    async with Yard(1, errors_in_a_row=2, attempts=10) as yard:
        engine = yard.engine("e0")
        task = yard.ask("a", new=3)
        for _ in range(2):
            await asyncio.sleep(2.5)
            engine.working[next(iter(engine.working))].versions.append(1)
            await asyncio.sleep(0.5)
        is_right(await task, new=3)
        assert engine.closed
        assert len(engine.requests) == 2


@virtual
async def test_request_ids_are_unique_among_those_in_flight():
    async with Yard(1) as yard:
        first = yard.ask("a")
        await asyncio.sleep(1)
        with pytest.raises(RequestRefusedError, match="already in flight"):
            await yard.ask("a")
        is_right(await first)


@virtual
async def test_busy_time_is_that_of_engines_with_a_request_and_outlives_them():
    async with Yard(2, token_s=1.0, affinity_slack=0, requests_per_engine=1) as yard:
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert yard.fleet.busy_s == 0
        await asyncio.gather(*(yard.ask(f"r{n}", [n], new=10) for n in range(3)))
        took = loop.time() - began
        assert yard.fleet.request_s == pytest.approx(30, abs=3)
        assert yard.fleet.busy_s == pytest.approx(yard.fleet.request_s)  # one at a time on each
        assert yard.fleet.busy_s < 2 * took
        before = yard.fleet.busy_s
        await asyncio.sleep(50)
        await yard.fleet.leave("e0")
        assert yard.fleet.busy_s == before


@pytest.mark.parametrize(("stops", "token"), [((7,), 1), ((9, 8), 2), ((6, 9), 0)])
def test_an_answer_that_goes_on_behind_its_end_is_no_generation(stops, token):
    """A server that ignores stop tokens writes the user's next turn too."""
    drawn = Generation(
        np.array([6, 7, 8, 9], np.int32), np.full(4, -1.0, np.float32), np.zeros(4, np.int32), "length"
    )
    with pytest.raises(EngineError, match=f"goes on behind token {token} of 4, {6 + token}, by which"):
        sound(request("r", [1], new=4, stop_token_ids=stops), drawn)
    assert sound(request("r", [1], new=4, stop_token_ids=(9,)), drawn) is drawn
