"""How far a learner's log-probs are from a server's: figures by hand, modes, and a run with a server."""

from dataclasses import replace
from math import exp

import numpy as np
import pytest
import torch

from actors.engines.base import Generation, GenerationRequest, Sampling
from actors.settings.engines import SglangEngineConfig
from benchmarks import on_policy
from benchmarks.on_policy import BATCHES, Load, bench_on_policy, differences, settings_of, usual
from bus.errors import ConfigError
from learner.logprobs.logprobs import TokenScores


def answered(logprobs):
    request = GenerationRequest("one", (7, 8), Sampling())
    versions = np.zeros(len(logprobs), np.int32)
    tokens = np.arange(len(logprobs), dtype=np.int32)
    return on_policy._of(request, Generation(tokens, np.float32(logprobs), versions, "length"))


def test_differences_by_hand(monkeypatch):
    samples = [answered([-1.0, -2.0]), answered([-3.0, -4.0])]
    ours = [[-1.0, -2.0], [-3.25, -4.0]]

    def score(backend, given, **others):
        assert list(given) == samples
        before = np.full(2, np.nan, np.float32)
        return [
            TokenScores(logprobs=np.concatenate((before, np.float32(each))), entropy=before) for each in ours
        ]

    monkeypatch.setattr(on_policy, "score", score)
    found = differences(None, samples)
    ratios = [1.0, 1.0, exp(-0.25), 1.0]
    assert found.pop("tokens") == 4
    assert found == pytest.approx({
        "bit_equal_fraction": 0.75,
        "bit_equal_fraction_of_first": 0.5,
        "mean_nats": 0.0625,
        "largest_nats": 0.25,
        "k1_nats": 0.0625,
        "k3_nats": np.mean([ratio - 1 for ratio in ratios]) + 0.0625,
        "ess_fraction": sum(ratios) ** 2 / (4 * sum(ratio**2 for ratio in ratios)),
    })  # fmt: skip


def test_a_mode_adds_its_settings_to_those_of_the_user():
    engine = SglangEngineConfig(server={"mem-fraction-static": 0.3})
    assert settings_of("ordinary", engine) == engine
    deterministic, shared = (settings_of(mode, engine) for mode in ("deterministic", "on-policy"))
    for each in (deterministic, shared):
        assert each.settings["enable_deterministic_inference"] is True
        assert each.settings["mem_fraction_static"] == 0.3
    assert "rl_on_policy_target" not in deterministic.settings
    assert shared.settings["rl_on_policy_target"] == "fsdp"
    with pytest.raises(ConfigError, match=r"attention_backend='fa3': set 'triton'"):
        settings_of("on-policy", replace_server(engine, attention_backend="fa3"))


def replace_server(engine, **settings):
    return engine.model_copy(update={"server": {**engine.server, **settings}})


def test_unknown_modes_and_learners_are_refused_by_name():
    with pytest.raises(ConfigError, match="--modes quick: there are ordinary, deterministic, on-policy"):
        usual(("quick",), ())
    with pytest.raises(ConfigError, match="--learners vllm: there are fsdp, megatron, fsdp-sglang"):
        usual((), ("fsdp", "vllm"))
    modes, learners = usual(("deterministic",), ())
    assert modes == ("deterministic",)
    assert ("fsdp-sglang" in learners) == torch.cuda.is_available()


def test_siblings_share_prompts():
    prompts = Load().prompts(256)
    assert len(prompts) == max(BATCHES)
    assert len({tuple(prompt) for prompt in prompts}) == 8


@pytest.mark.nightly
@pytest.mark.sglang
def test_learners_are_compared_with_a_server(monkeypatch):
    monkeypatch.setattr(on_policy, "BATCHES", (1, 8))
    load = replace(Load(), new_tokens=8, longest_prompt=20)
    report = bench_on_policy(load, SglangEngineConfig(), ("ordinary",), ("fsdp", "megatron"))
    of_learners = report["figures"]["ordinary"]
    assert of_learners.keys() == {"fsdp", "megatron"}
    for ways in of_learners.values():
        assert ways.keys() == {
            f"v{version} {how} x{batch}"
            for version in (0, 1)
            for how in ("greedy", "sampled")
            for batch in (1, 8)
        }
        for name, figures in ways.items():
            assert figures["tokens"] == (32 if name.endswith("x1") else 64)
            assert figures["largest_nats"] < 1e-5, "both compute in float32"
            assert figures["ess_fraction"] == pytest.approx(1.0)
