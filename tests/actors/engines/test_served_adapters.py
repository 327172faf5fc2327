"""Which adapters servers are to add themselves, told before any is started."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from actors.engines.served_adapters import ServedAdapters, served_adapters
from actors.settings.engines import EmbeddedEngineConfig, SglangEngineConfig
from bus.errors import ConfigError
from bus.messages import AdaptedBase, BlobRef

BLOB = BlobRef(subject="s", chunks=1, size_bytes=1, digest="ab" * 16)
ADAPTED = AdaptedBase(weights=BLOB, scale=2.0, rank=8, modules=("mlp.up_proj", "self_attn.q_proj"))
LOADED = SglangEngineConfig(adapter="loaded")


def test_a_server_has_the_versions_that_rollouts_within_the_staleness_bound_may_have():
    found = served_adapters(LOADED, ADAPTED, max_staleness=4)
    assert found == ServedAdapters(rank=8, scale=2.0, modules=("q_proj", "up_proj"), versions=6)
    assert found.room.slots == 7, "the next version comes before the oldest goes"


def test_engines_that_take_whole_weights_add_no_adapters():
    for config in (SglangEngineConfig(), EmbeddedEngineConfig()):
        assert served_adapters(config, ADAPTED, max_staleness=4) is None


@pytest.mark.parametrize(
    ("adapted", "reason"),
    [
        (None, "publishes whole weights: train adapters with learner.lora.rank"),
        (replace(ADAPTED, rank=0), "is of an older Sluice than this actor, .*: start it again"),
        (
            replace(ADAPTED, weight_decomposed=True),
            r"weight_decomposed\), and SGLang adds no such adapters: set",
        ),
        (
            replace(ADAPTED, modules=("experts.up_proj",)),
            r"no adapters of routed experts, as experts\.up_proj",
        ),
        (replace(ADAPTED, modules=("shared_expert.up_proj",)), "no adapter of shared_expert.up_proj"),
        (replace(ADAPTED, modules=("shared_experts.up_proj",)), "no adapter of shared_experts.up_proj"),
        (replace(ADAPTED, modules=("self_attn.q_a_proj",)), "no adapter of self_attn.q_a_proj is loaded"),
        (replace(ADAPTED, modules=("mlp.shared_expert_gate",)), "no adapter of mlp.shared_expert_gate"),
    ],
)
def test_adapters_that_no_server_could_add_are_refused(adapted, reason):
    with pytest.raises(ConfigError, match=reason):
        served_adapters(LOADED, adapted, max_staleness=4)


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        (None, "publishes whole weights"),
        (
            replace(ADAPTED, rank=4),
            "are of rank 4 and scale 2 in q_proj, up_proj now, .* for rank 8 and scale",
        ),
        (replace(ADAPTED, scale=1.0), "scale 1 in .* now, .* and scale 2 in .*: start this actor again"),
        (replace(ADAPTED, modules=("self_attn.q_proj",)), "in q_proj now, .* in q_proj, up_proj: start"),
    ],
)
def test_what_a_later_learner_announces_is_what_the_servers_were_started_for(later, reason):
    found = served_adapters(LOADED, ADAPTED, max_staleness=4)
    found.refuse_others(ADAPTED)
    with pytest.raises(ConfigError, match=reason):
        found.refuse_others(later)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"update": "group"}, "the learner sends whole weights there: set adapter=merged"),
        ({"disaggregation": {"enabled": True}}, "adapters are loaded into single servers only"),
        ({"server": {"dp-size": 2}}, "no adapters into replicas: set actors.fleet.engines instead"),
    ],
)
def test_servers_that_adapters_cannot_get_into_are_refused(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        SglangEngineConfig.model_validate({"adapter": "loaded", **settings})
    SglangEngineConfig.model_validate(settings)
