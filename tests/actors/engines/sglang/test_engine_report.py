"""What actors tell of engines: load, use of the cache, prompts found there and drafts that were accepted."""

from types import SimpleNamespace

import torch

from actors.engines.fleet.fleet import Fleet
from actors.metrics import engine_report
from actors.metrics.engine_report import EngineReport
from actors.settings.fleet import FleetConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.actor_counters import MEANS
from tests.actors.tiny import request

FOLLOWER = SimpleNamespace(pause_s=0.1, receive_s=0.2)


async def test_status_and_counters_tell_what_the_server_says_of_its_answers(stand_in, attach, monkeypatch):
    monkeypatch.setattr(engine_report, "WINDOW_S", 0.0)  # each look ends a window
    engine = attach()

    async def build():
        return engine

    fleet = Fleet({"engine-0": build}, FleetConfig())
    report = EngineReport(fleet, FOLLOWER)
    await fleet.start()
    await fleet.load_weights({"small": torch.ones(3)}, 0)
    assert not {"prefix_hit_fraction", "accepted_tokens_per_pass"} & report.state().keys(), "nothing is told"
    stand_in.work = {"prompt_tokens": 8, "cached_tokens": 6, "completion_tokens": 9, "spec_verify_ct": 3}
    await fleet.generate(request("drafted", [1] * 8))
    stand_in.work = {"prompt_tokens": 8, "cached_tokens": 0, "completion_tokens": 30}
    await fleet.generate(request("plain", [1] * 8))
    state, counters = report.state(), report.counters(["my/turns"])
    assert (state["prefix_hit_fraction"], state["accepted_tokens_per_pass"]) == (6 / 16, 9 / 3)
    assert (counters["engine/prompt_tokens"], counters["engine/cached_tokens"]) == (16, 6)
    assert (counters["engine/running"], counters["engine/queued"]) == (0, 0)
    assert counters["engine/tokens_per_s"] >= 0
    assert counters[MEANS] == ["my/turns", "engine/prefix_hit_fraction", "engine/accepted_tokens_per_pass"]
    await fleet.leave("engine-0")
    assert fleet.work_counts == (16, 6, 9, 3), "what engines did that are gone"
    await fleet.close()


async def test_an_engine_that_tells_nothing_of_its_cache_has_only_its_load(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(engine_report.time, "monotonic", lambda: now_s[0])
    engine = ScriptedEngine(lambda prompt: [*prompt, 0])

    async def build():
        return engine

    fleet = Fleet({"engine-0": build}, FleetConfig())
    report = EngineReport(fleet, FOLLOWER)
    await fleet.start()
    await fleet.generate(request("a", [1, 2, 3]))
    now_s[0] += 2.0
    assert report.state()["generated_tokens_per_s"] == fleet.tokens_generated / 2
    now_s[0] += 0.1
    counters = report.counters()
    assert counters["engine/tokens_per_s"] == fleet.tokens_generated / 2, "the rate of the last whole window"
    assert counters[MEANS] == []
    await fleet.close()
    assert fleet.tokens_generated == 4
