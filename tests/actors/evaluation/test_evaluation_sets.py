"""Several data sets of one version: samples, sampling and scores of their own."""

import pytest

from actors.evaluation.engines import OwnEngine, RolloutEngines
from benchmarks.scripted_engine import ScriptedEngine
from bus.codec import decode, encode
from bus.errors import SchemaError
from bus.evaluation_messages import EvaluationTask
from storage.weights.blob_sources import Blobs
from tests.actors.evaluation.asked_sets import SomeRight, ask
from tests.actors.held_out import followed
from tests.actors.weights.publications import publish

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


async def test_pass_at_k_of_each_data_set_with_its_own_sampling(bus, evaluations):
    engine, environment = ScriptedEngine(lambda tokens: [5] * 8, policy_version=-1), SomeRight()
    await engine.start()
    async with followed(bus, engine) as follower:
        rollouts = RolloutEngines(bus, engine, follower, prompts_at_once=64)
        async with evaluations.evaluator(rollouts, environment):
            asked = await publish(bus, 3)
            own = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_new_tokens": 4}
            await ask(bus, asked, data_set="aime", samples=4, pass_at=(1, 2, 4), **own)
            aime = await evaluations.result()
            await ask(bus, asked, data_set="gpqa")
            gpqa = await evaluations.result()
            await ask(bus, asked)
            held_out = await evaluations.result()
    await engine.close()
    # of 4 samples 0, 1 and 2 are right: of pairs 0, 3 and 5 of 6 hold a right one, and 0, 0, 1 two
    assert aime.scores == {
        "pass@1": pytest.approx(0.25), "pass@2": pytest.approx((3 + 5) / 18), "pass@4": pytest.approx(2 / 3),
        "pass^1": pytest.approx(0.25), "pass^2": pytest.approx(1 / 18), "pass^4": 0.0,
    }  # fmt: skip
    assert (aime.data_set, aime.samples, aime.sampled, aime.greedy) == ("aime", 4, 0.25, 0.0)
    assert [(one.data_set, one.samples, one.scores) for one in (gpqa, held_out)] == [
        ("gpqa", 1, {}),
        ("", 1, {}),
    ]
    sampled, greedy = engine.requests[:12], engine.requests[12:15]
    for requests, temperature in ((sampled, 0.5), (greedy, 0.0)):
        found = {(s.temperature, s.top_p, s.top_k, s.max_new_tokens) for s in (r.sampling for r in requests)}
        assert found == {(temperature, 0.9, 7, 4)}
    assert {request.sampling.max_new_tokens for request in engine.requests[15:]} == {12}
    assert sorted(environment.tasks[:12]) == [f"heldout-aime-{n}.{s}" for n in range(3) for s in range(4)]
    assert sorted(environment.tasks[-3:]) == ["heldout-0", "heldout-1", "heldout-2"]


async def test_an_engine_of_its_own_loads_a_version_once_for_all_data_sets(bus, evaluations):
    loads = []

    class Counting(ScriptedEngine):
        async def load_weights(self, state, policy_version):
            loads.append(policy_version)
            await super().load_weights(state, policy_version)

    own = OwnEngine(lambda: Counting(lambda tokens: [5] * 8, policy_version=-1), Blobs(bus))
    async with evaluations.evaluator(own, SomeRight()):
        for version in (3, 4):
            asked = await publish(bus, version)
            for name in ("aime", "gpqa"):
                await ask(bus, asked, data_set=name, samples=version)
                result = await evaluations.result()
                assert (result.data_set, result.drawn_by) == (name, (version, version))
    assert loads == [3, 4]


@pytest.mark.parametrize(
    "settings", [{"pass_at": (2,)}, {"samples": 0}, {"max_new_tokens": 0}, {"temperature": float("nan")}]
)
async def test_a_task_that_nobody_can_carry_out_is_refused(bus, settings):
    asked = await publish(bus, 3)
    task = EvaluationTask(policy=asked, prompts=asked.model, **settings)
    with pytest.raises(SchemaError, match=r"cannot estimate|nothing can be sampled"):
        decode(encode(task), EvaluationTask)
