"""The probe finds engines that sample from another policy than they say, at a real fleet of real engines."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.fleet.engine_state import ScoredTokens
from actors.engines.fleet.fleet import Fleet
from actors.settings.engines import EmbeddedEngineConfig
from actors.settings.fleet import FleetConfig
from actors.weights.probe import ProbeCheck
from bus.errors import SchemaError
from bus.images import PlacedImage
from bus.messages import BlobRef, PolicyManifest, Probe
from tests.actors.tiny import VOCAB, tiny_model

TOKENS = tuple(map(tuple, np.random.default_rng(0).integers(0, VOCAB, (4, 16)).tolist()))
BLOB = BlobRef(subject="blob", chunks=1, size_bytes=1, digest="")


@torch.inference_mode()
def said_by(model) -> Probe:
    """What the learner would say with these weights, by transformers in float64."""
    logprobs = model.double()(torch.tensor(TOKENS)).logits.log_softmax(-1)[:, :-1]
    model.float()
    chosen = logprobs.gather(2, torch.tensor(TOKENS)[:, 1:, None])[..., 0]
    return Probe(token_ids=TOKENS, logprobs=tuple(map(tuple, chosen.tolist())))


def manifest(version: int, model, **changes) -> PolicyManifest:
    given = PolicyManifest(
        policy_version=version, incarnation="one", snapshot=BLOB, model=BLOB, stage="rl", probe=said_by(model)
    )
    return replace(given, **changes)


def moved(by: float):
    """The first model, its weights changed a little."""
    model = tiny_model("qwen3", seed=0)
    with torch.no_grad():
        for n, parameter in enumerate(model.parameters()):
            parameter += by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n))
    return model


@pytest.fixture
async def fleet():
    async def build():
        return EmbeddedEngine(tiny_model("qwen3", seed=9), EmbeddedEngineConfig(slots=2))

    fleet = Fleet({"left": build, "right": build}, FleetConfig(engines=2))
    await fleet.start()
    yield fleet
    await fleet.close()


async def test_engines_that_have_the_version_agree_and_one_with_other_weights_is_named(fleet):
    check = ProbeCheck(fleet, bound_nats=0.1)
    versions = [moved(0.003 * n) for n in range(4)]
    for version, model in enumerate(versions):
        await fleet.load_weights(model.state_dict(), version)
        check.loaded(manifest(version, model))
        await check.check()
        assert check.alarms == {}
        assert set(check.nats) == {"left", "right"}
        assert max(check.nats.values()) < 1e-5
    # the update says version 4 and brings the weights of version 3, as an update does that sends too little
    await fleet.load_weights(versions[3].state_dict(), 4)
    check.loaded(manifest(4, moved(0.012)))
    await check.check()
    assert check.nats["left"] < 0.1, "the bound alone would not have found it"
    assert check.alarms == {
        name: f"{name} says that it has version 4, but it samples as version 3 did"
        for name in ("left", "right")
    }
    alarms = check.alarms
    await fleet.load_weights(versions[0].state_dict(), 5)  # which the learner has not scored
    await check.check()
    assert check.alarms == alarms, "nothing is known of version 5"
    await fleet.load_weights(moved(0.012).state_dict(), 4)
    await check.check()
    assert check.alarms == {}


async def test_other_weights_than_any_version_had_are_told_by_the_bound(fleet):
    check = ProbeCheck(fleet, bound_nats=0.1)
    await fleet.load_weights(tiny_model("qwen3", seed=5).state_dict(), 0)
    check.loaded(manifest(0, tiny_model("qwen3", seed=0)))
    await check.check()
    assert "differs from the learner by" in check.alarms["left"]
    assert "actors.probe_bound_nats is 0.1" in check.alarms["left"]


async def test_what_cannot_be_compared_gives_no_alarm(fleet):
    check, model = ProbeCheck(fleet, bound_nats=0.1), tiny_model("qwen3", seed=0)
    await fleet.load_weights(tiny_model("qwen3", seed=5).state_dict(), 7)
    for other in (manifest(3, model), manifest(7, model, probe=None)):
        check.loaded(other)  # the engines have another version, or the learner scored nothing
        await check.check()
        assert (check.alarms, check.nats) == ({}, {})


async def test_tokens_of_another_vocabulary_cost_a_warning_and_no_engine(fleet):
    model = tiny_model("qwen3", seed=0)
    await fleet.load_weights(model.state_dict(), 0)
    assert await fleet.score([[0, VOCAB]]) == {}
    assert set(await fleet.score(TOKENS)) == {"left", "right"}


async def test_images_for_a_model_that_reads_text_cost_a_warning_and_no_engine(fleet):
    await fleet.load_weights(tiny_model("qwen3", seed=0).state_dict(), 0)
    assert await fleet.score(TOKENS[:1], [[PlacedImage("image", 1, 1, 2)]]) == {}
    assert set(await fleet.score(TOKENS[:1], [[]])) == {"left", "right"}


@pytest.mark.parametrize("lengths", [[], [14], [15, 15]])
def test_log_probs_that_do_not_belong_to_the_tokens_are_refused(lengths):
    with pytest.raises(SchemaError, match="log-probs"):
        Probe(token_ids=TOKENS[:1], logprobs=tuple((0.0,) * n for n in lengths)).check()


async def test_in_exact_arithmetic_any_difference_is_an_alarm(fleet):
    model = moved(0.0)
    await fleet.load_weights(model.state_dict(), 0)
    check = ProbeCheck(fleet, bound_nats=0.1, exact=True)
    [_, said] = (await fleet.score(TOKENS)).values()
    same = Probe(token_ids=TOKENS, logprobs=tuple(map(tuple, said.logprobs)))
    check.loaded(manifest(0, model, probe=same))
    await check.check()
    assert check.alarms == {}
    assert check.nats == {"left": 0.0, "right": 0.0}
    last = (*same.logprobs[0][:-1], same.logprobs[0][-1] + 1e-6)
    check.loaded(manifest(0, model, probe=replace(same, logprobs=(last, *same.logprobs[1:]))))
    await check.check()
    assert "on the probe of version 0, model.numerics=exact allows none" in check.alarms["left"]


class Broken:
    """Engines of which one has NaN for text, and the learner's log-probs for what shows an image."""

    async def score(self, sequences, images=()):
        return {"left": ScoredTokens(0, [[float("nan")], [-1.0]])}


async def test_an_engine_without_a_log_prob_for_text_has_no_difference_that_looks_small():
    shown = PlacedImage("image", 1, 1, 1)
    probe = Probe(token_ids=((1, 2), (1, 3, 2)), logprobs=((-1.0,), (-1.0,)), images=((), (shown,)))
    check = ProbeCheck(Broken(), bound_nats=0.1)
    check.loaded(manifest(0, moved(0.0), probe=probe))
    await check.check()
    assert np.isnan(check.nats["left"])
    assert "left differs from the learner by nan nats" in check.alarms["left"]


async def test_a_learner_that_comes_back_with_other_kernels_than_the_engines_is_an_alarm(fleet):
    model = moved(0.0)
    await fleet.load_weights(model.state_dict(), 0)
    kernels = {"sglang": "0.5.17", "torch": "2.9.1"}
    check = ProbeCheck(fleet, bound_nats=0.1, kernels=kernels)
    check.loaded(manifest(0, model, kernels=kernels))
    await check.check()
    assert check.alarms == {}
    check.loaded(manifest(0, model, kernels=kernels | {"sglang": "0.5.23"}))
    await check.check()
    others = (
        "left has sglang 0.5.17 at the server and 0.5.23 at the learner: install the same versions for both"
    )
    assert check.alarms["left"] == others
    check.loaded(manifest(0, moved(0.1), kernels=kernels | {"sglang": "0.5.23"}))
    await check.check()
    log_probs, _, versions = check.alarms["left"].partition("; ")
    assert "left differs from the learner by" in log_probs
    assert versions == others, "which may be why"
