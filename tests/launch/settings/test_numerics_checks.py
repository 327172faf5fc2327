"""Settings by which learner and engine would not compute alike are refused together, each with its remedy."""

import pytest

from bus.errors import ConfigError
from launch.settings.numerics_checks import engine_of
from launch.settings.run_config import resolve
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.config.process_settings import shared_kernels, used_diagnostics

EXACT = {"model": {"dtype": "float32", "numerics": "exact"}, "learner": {"publish_dtype": "float32"}}


def test_settings_that_go_with_exact_arithmetic_are_taken():
    assert resolve(EXACT).model.numerics == "exact"
    aware = {"learner": {"publication": {"quantisation": "int4"}, "quantisation_aware": True}}
    assert resolve(EXACT, aware).learner.quantisation_aware


def test_all_settings_that_do_not_are_named_at_once():
    other = {
        "model": {"dtype": "bfloat16"},
        "learner": {"publish_dtype": "bfloat16", "lora": {"rank": 8}},
        "actors": {"engine": {"dtype": "bfloat16"}},
    }
    with pytest.raises(ConfigError) as raised:
        resolve(EXACT, other)
    said = str(raised.value)
    for setting in (
        "model.dtype=bfloat16", "learner.publish_dtype=bfloat16", "learner.lora.rank=8",
        "actors.engine.dtype=bfloat16",
    ):  # fmt: skip
        assert f"- {setting}:" in said


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"learner": {"parallel": {"tensor": 2}, "world": {"processes": 2}}}, r"parallel\.tensor=2: ranks"),
        ({"learner": {"batch": {"share_prefixes": True}}}, "share_prefixes=true: its attention"),
        ({"sampling": {"max_new_tokens": 65536}}, r"sampling\.max_new_tokens=65536: exact sums take at most"),
        ({"learner": {"fp8_matmul": True}}, "fp8_matmul=true: its products"),
        ({"actors": {"engine": {"attention": "eager"}}}, r"actors\.engine\.attention=eager: exact attention"),
        ({"actors": {"engine": {"type": "sglang"}}}, r"actors\.engine\.type=sglang: it adds up"),
        (
            {"learner": {"publication": {"quantisation": "fp8_block"}}},
            r"quantisation=fp8_block: set it to none, or learner.quantisation_aware to true",
        ),
    ],
)
def test_engines_of_other_kernels_and_rounded_weights_are_refused(other, said):
    with pytest.raises(ConfigError, match=said):
        resolve(EXACT, other)


def test_any_mismatch_is_out_of_its_range_in_exact_arithmetic():
    def largest(numerics: str, updates: int) -> float | None:
        learner = LearnerConfig.model_validate({"batch": {"updates": updates}})
        return used_diagnostics(ModelConfig(numerics=numerics), learner).largest_mismatch_nats

    assert largest("exact", 1) == 0.0
    assert largest("sglang", 1) == 0.1, "updates in mid-answer leave keys of older weights"
    assert largest("exact", 2) == largest("fast", 1) == 0.1, "weights move between the updates of a step"


def test_engines_must_have_the_learners_packages_only_where_they_share_kernels():
    assert set(shared_kernels(ModelConfig(numerics="sglang"))) == {"sglang", "torch", "triton"}
    assert shared_kernels(ModelConfig(numerics="exact")) == shared_kernels(ModelConfig()) == {}


SGLANG = {
    "model": {"dtype": "bfloat16", "numerics": "sglang"},
    "learner": {"backend": "fsdp", "publish_dtype": "bfloat16"},
    "actors": {"engine": {"type": "sglang"}},
}


def test_servers_are_started_in_the_mode_that_the_learner_computes_in():
    config = resolve(SGLANG, {"actors": {"engine": {"server": {"mem-fraction-static": 0.4}}}})
    engine = engine_of(config)
    assert engine.settings == {
        "mem_fraction_static": 0.4, "enable_deterministic_inference": True, "rl_on_policy_target": "fsdp",
        "attention_backend": "triton",
    }  # fmt: skip
    assert engine.environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "1"
    assert engine_of(resolve({})) == resolve({}).actors.engine


def test_all_that_contradicts_that_mode_is_named_at_once():
    engine = {
        "server": {
            "attention-backend": "fa3", "tp_size": 2, "speculative_algorithm": "NGRAM",
            "enable_deterministic_inference": False,
        },
        "environment": {"TORCHDYNAMO_DISABLE": "0"},
    }  # fmt: skip
    other = {
        "model": {"dtype": "float32"},
        "learner": {"backend": "megatron", "lora": {"rank": 8}, "publication": {"quantisation": "int4"}},
        "sampling": {"temperature": 0.7, "top_p": 0.9},
        "actors": {"engine": engine},
    }
    with pytest.raises(ConfigError) as raised:
        resolve(SGLANG, other)
    for setting in (
        "model.dtype=float32", "learner.backend=megatron", "learner.lora.rank=8", "sampling.temperature=0.7",
        "learner.publication.quantisation=int4", "actors.engine.server.attention_backend='fa3'",
        "actors.engine.server.tp_size=2", "actors.engine.server.speculative_algorithm='NGRAM'",
        "actors.engine.server.enable_deterministic_inference=False",
        "actors.engine.environment.TORCHDYNAMO_DISABLE='0'",
    ):  # fmt: skip
        assert f"- {setting}:" in str(raised.value)
    assert "- sampling.top_p, top_k or min_p cut tokens off" in str(raised.value)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"type": "embedded"}, r"actors\.engine\.type=embedded: set it to sglang"),
        ({"type": "sglang", "url": "http://gpu:30000"}, r"url=http://gpu:30000: a running server"),
    ],
)
def test_other_engines_than_our_own_servers_are_refused_in_that_mode(engine, said):
    with pytest.raises(ConfigError, match=said):
        resolve({**SGLANG, "actors": {"engine": engine}})


def test_agents_that_may_choose_a_temperature_are_refused_in_that_mode():
    agent = {"type": "agent", "command": "true", "gateway": {"pinned": ["top_p", "top_k"]}}
    with pytest.raises(ConfigError, match=r"- gateway\.pinned of actors\.environment lets agents choose"):
        resolve(SGLANG, {"actors": {"environment": agent}})


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("decode-attention-backend", "fa3", "set 'triton'"),
        ("prefill_attention_backend", "flashinfer", "set 'triton'"),
        ("model_impl", "transformers", "set 'sglang'"),
        ("json_model_override_args", '{"rope_theta": 1}', "set '{}'"),
        ("enable_mixed_chunk", True, "it computes otherwise; leave it out"),
    ],
)
def test_settings_by_which_a_server_quietly_computes_otherwise_are_refused(setting, value, remedy):
    with pytest.raises(ConfigError, match=rf"server\.{setting.replace('-', '_')}=.*: {remedy}"):
        resolve(SGLANG, {"actors": {"engine": {"server": {setting: value}}}})
