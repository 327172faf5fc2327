"""Fresh tokens of real SGLang servers agree with the weights that they name as without any update."""

import dataclasses

import numpy as np
import pytest

from actors.engines.base import Generation
from actors.settings.engines import SglangEngineConfig
from benchmarks.kv_versions import (
    MODES,
    Answer,
    Load,
    Policy,
    _logprobs,
    bench_kv_versions,
    compared,
    refuse_unknown,
)
from bus.errors import ConfigError

MOST_NATS = 2e-6
"""Ten times what the arithmetic of server and transformers differs in a token of this model."""
ENGINE = SglangEngineConfig(type="sglang", start_timeout_s=240.0)
"""Each server runs on this machine's CPU."""
SMALL = Load(answers=120, updates=4)


def check(load: Load, mode: str) -> dict[str, float]:
    report = bench_kv_versions(load, ENGINE, [mode])
    figures = report["figures"][mode]
    assert figures["answers"] == load.answers
    assert figures["fresh_answers"] > load.answers * 0.4
    assert figures["fresh_largest_nats"] < MOST_NATS
    return figures


@pytest.mark.nightly
@pytest.mark.sglang
@pytest.mark.timeout(420)
@pytest.mark.parametrize("mode", ["in_place", "group"])
def test_requests_that_wait_over_updates_find_no_prefixes_of_older_weights(mode):
    figures = check(SMALL, mode)
    assert figures["older_kv_tokens"] > 0, "what runs over an update is marked"
    assert figures["older_kv_largest_nats"] > 10 * MOST_NATS, "and differs, so that a mistake would show"


@pytest.mark.nightly
@pytest.mark.sglang
@pytest.mark.timeout(420)
def test_what_is_computed_again_after_an_update_is_fresh():
    assert check(SMALL, "retract")["older_kv_tokens"] == 0


@pytest.mark.sglang
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "hierarchical_cache"])
def test_a_thousand_answers_over_twenty_updates(mode):
    figures = check(Load(), mode)  # SGLang's hierarchical cache does not start on a CPU
    assert (figures["older_kv_tokens"] > 0) == (mode in ("in_place", "group", "pair"))


def test_a_token_of_other_weights_than_it_names_shows():
    load, generations = Load(answers=4, updates=1, lr=1e-2), []
    policy = Policy(load, adapted=False)
    requests = list(load.requests(256))
    for _ in range(2):
        for asked in requests:
            versions = np.full(6, policy.version, np.int32)
            drawn = Generation(np.arange(6, dtype=np.int32), np.zeros(6, np.float32), versions, "length")
            logprobs = _logprobs(policy.model, Answer(asked.token_ids, drawn))
            generations.append(Answer(asked.token_ids, dataclasses.replace(drawn, logprobs=logprobs)))
        policy.update()
    assert compared(load, generations, adapted=False)["fresh_largest_nats"] < 1e-6
    wrong = dataclasses.replace(generations[0].generation, policy_versions=np.ones(6, np.int32))
    found = compared(load, [generations[0]._replace(generation=wrong), *generations[1:]], adapted=False)
    assert found["fresh_largest_nats"] > 1e-3
    marked = dataclasses.replace(wrong, kv_versions=np.zeros(6, np.int32))
    found = compared(load, [generations[0]._replace(generation=marked), *generations[1:]], adapted=False)
    assert found["fresh_largest_nats"] < 1e-6
    assert (found["older_kv_tokens"], found["fresh_answers"]) == (6, 7)


def test_adapters_change_what_their_versions_compute():
    load = Load(updates=1)
    policies = [Policy(load, adapted=True) for _ in range(2)]
    policies[1].update()
    names = set(policies[0].published)
    assert names > set(dict(policies[0].model.named_parameters()))
    before, after = (dict(policy.model.named_parameters()) for policy in policies)
    changed = {name.split(".")[-2] for name in before if not before[name].equal(after[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_mode_that_there_is_none_of_is_named():
    with pytest.raises(ConfigError, match="--modes upside_down: there are no_updates, in_place"):
        refuse_unknown(["in_place", "upside_down"])
