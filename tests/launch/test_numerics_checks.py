"""Settings by which exact arithmetic would not be exact are refused together, each with its remedy."""

import pytest

from bus.errors import ConfigError
from launch.config import resolve
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.settings import used_diagnostics

EXACT = {
    "model": {"dtype": "float32", "numerics": "exact"},
    "learner": {"publish_dtype": "float32"},
}


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
        ({"actors": {"engine": {"type": "sglang"}}}, r"actors\.engine\.type=sglang: its kernels"),
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
    assert largest("exact", 2) == largest("fast", 1) == 0.1, "weights move between the updates of a step"
