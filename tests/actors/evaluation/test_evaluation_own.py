"""Held-out reward on an engine of its own, and which engine it is measured on."""

import pytest
import torch
from structlog.testing import capture_logs

from actors.engines.embedded.engine import EmbeddedEngine
from actors.evaluation.engines import OwnEngine
from actors.settings.actors import ActorsConfig, EvaluatorConfig
from actors.settings.engines import EmbeddedEngineConfig, SglangEngineConfig
from bus.errors import EngineError
from bus.streams.blob_store import delete_blob
from storage.weights.blob_sources import Blobs
from tests.actors.held_out import Recording, published
from tests.actors.tiny import tiny_model
from tests.actors.weights.publications import publish

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


async def test_an_own_engine_keeps_the_version_while_others_are_published(bus, evaluations, model):
    async def publish_another(run):
        await published(bus, 1 + run, tiny_model("qwen3", seed=run))

    built = []

    def build():
        built.append(EmbeddedEngine(tiny_model("qwen3", seed=9), EmbeddedEngineConfig(seed=0)))
        return built[-1]

    environment = Recording(publish_another)
    async with evaluations.evaluator(OwnEngine(build, Blobs(bus)), environment):
        asked = await published(bus, 1, model)
        await evaluations.ask(asked)
        first = await evaluations.result()
        await evaluations.ask(await published(bus, 50, tiny_model("qwen3", seed=3)))
        second = await evaluations.result()
        await evaluations.ask(await published(bus, 40, tiny_model("qwen3", seed=4)))
        third = await evaluations.result()
    assert [result.drawn_by for result in (first, second, third)] == [(1, 1), (50, 50), (40, 40)]
    assert set(environment.versions) == {1, 40, 50}
    assert len(built) == 1
    assert not built[0]._thread.is_alive()


@pytest.mark.parametrize("error", [EngineError("no server"), torch.OutOfMemoryError("out of memory")])
async def test_an_engine_that_fails_costs_its_evaluation_and_not_the_actor(bus, evaluations, model, error):
    """It is left to others first; when it comes back it is skipped. The next one starts another engine."""
    built = []

    class Failing(EmbeddedEngine):
        async def load_weights(self, state, policy_version):
            if len(built) <= 2:
                raise error
            await super().load_weights(state, policy_version)

    def build():
        built.append(Failing(tiny_model("qwen3", seed=9), EmbeddedEngineConfig(seed=0)))
        return built[-1]

    with capture_logs() as logs:
        async with evaluations.evaluator(OwnEngine(build, Blobs(bus)), Recording()):
            await evaluations.ask(await published(bus, 1, model))
            await evaluations.settled()
            assert evaluations.results.empty()
            await evaluations.ask(await published(bus, 2, model))
            assert (await evaluations.result()).drawn_by == (2, 2)
    said = [entry for entry in logs if entry["event"] in ("message_handed_back", "evaluation_skipped")]
    assert [entry["event"] for entry in said] == ["message_handed_back", "evaluation_skipped"]
    assert all(str(error) in entry["reason"] for entry in said)
    assert not any(engine._thread.is_alive() for engine in built)


async def test_an_own_engine_skips_a_version_whose_weights_are_gone(bus, evaluations):
    def build():
        raise AssertionError("there is nothing to load")

    gone = await publish(bus, 1)
    await delete_blob(bus, gone.snapshot)
    async with evaluations.evaluator(OwnEngine(build, Blobs(bus)), Recording()):
        await evaluations.ask(gone)
        await evaluations.settled()
    assert evaluations.results.empty()


@pytest.mark.parametrize(
    ("engine", "chosen", "expected"),
    [
        (EmbeddedEngineConfig(), "auto", "own"),
        (SglangEngineConfig(), "auto", "rollout"),
        (SglangEngineConfig(), None, "rollout"),  # as records of older builds have it
        (EmbeddedEngineConfig(), "none", "none"),
        (EmbeddedEngineConfig(), "rollout", "rollout"),
        (SglangEngineConfig(), "own", "own"),
    ],
)
def test_servers_evaluate_themselves_unless_the_settings_say_otherwise(engine, chosen, expected):
    config = ActorsConfig(engine=engine, evaluation=EvaluatorConfig(engine=chosen))
    assert config.evaluates_on == expected
