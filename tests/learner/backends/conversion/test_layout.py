import re

import pytest
import torch
from pydantic import ValidationError

from bus.errors import ConfigError
from learner.backends.factory import init_world
from learner.backends.megatron.conversion.families import shape_of
from learner.backends.megatron.core.layout import layers_of_last_stage, layout_problems, padded_vocabulary
from learner.backends.megatron.model.model import build_chunks
from learner.config.parallel import ParallelConfig, refuse_world
from tests.learner.tiny import tiny_config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence": True}, "sequence=true needs tensor > 1"),
        ({"virtual_pipeline": 2}, "virtual_pipeline=2 needs pipeline > 1"),
        ({"overlap_param_gather": True}, "needs distributed_optimizer=true and overlap_grad_reduce=true"),
        (
            {"overlap_param_gather": True, "overlap_grad_reduce": True, "distributed_optimizer": False},
            "needs distributed_optimizer=true and overlap_grad_reduce=true",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(settings, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        ParallelConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({"tensor": 2, "context": 2}, 6, "tensor * context * pipeline = 4 does not divide the world of 6"),
        ({"pipeline": 2, "expert": 2}, 2, "expert_tensor * expert * pipeline = 4 does not divide the world"),
        ({"expert": 4, "expert_tensor": 2, "context": 2}, 4, "= 8 does not divide the world of 4 ranks"),
    ],
)
def test_a_world_that_does_not_divide_is_refused(settings, ranks, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        refuse_world(ParallelConfig(**settings), ranks)


def test_a_world_is_refused_before_it_waits_for_the_others(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="world of 3 ranks: start a multiple of 2"):
        init_world(ParallelConfig(tensor=2))


@pytest.mark.parametrize(
    ("settings", "family", "messages"),
    [
        ({"tensor": 4}, "qwen3", []),
        (
            {"tensor": 5},
            "qwen3",
            [
                "num_attention_heads=4 does not divide by tensor=5",
                "intermediate_size=96 does not divide by tensor=5",
                "tensor=5 ranks cannot share num_key_value_heads=2 of head_dim=24 evenly",
            ],
        ),
        (
            {"pipeline": 3},
            "qwen3",
            ["num_hidden_layers=2 leaves the last of pipeline=3 stages without a layer"],
        ),
        (
            {"pipeline": 2, "virtual_pipeline": 2},
            "llama",
            ["num_hidden_layers=2 does not divide by pipeline * virtual_pipeline=4"],
        ),
        ({"expert": 2}, "qwen3", ["expert=2 and expert_tensor=1: the model has no experts"]),
        ({"expert": 4}, "qwen3_moe", ["number of experts=6 does not divide by expert=4"]),
        ({"expert_tensor": 3}, "qwen3_moe", ["width of an expert=40 does not divide by expert_tensor=3"]),
        ({"tensor": 2}, "qwen3_moe", ["tensor=2 of a model with experts needs sequence=true"]),
        ({"tensor": 2, "sequence": True}, "minimax_m2", ["queries of a token are normed together"]),
        ({"tensor": 2}, "deepseek_v3", ["tensor=2 of a model with experts needs sequence=true"]),
    ],
)
def test_everything_of_a_model_that_does_not_divide_is_named(settings, family, messages):
    problems = layout_problems(ParallelConfig(**settings), shape_of(tiny_config(family)))
    assert len(problems) == len(messages)
    for problem, message in zip(problems, messages, strict=True):
        assert message in problem


@pytest.mark.parametrize(
    ("layers", "stages", "last"), [(8, 4, 2), (61, 1, 61), (61, 4, 13), (61, 16, 1), (10, 7, -2)]
)
def test_the_last_stage_has_fewer_layers_where_they_do_not_divide(layers, stages, last):
    assert layers_of_last_stage(layers, stages) == last


@pytest.mark.parametrize(
    ("sizes", "tensor", "message"),
    [
        ({"num_key_value_heads": 4}, 3, "num_key_value_heads=4 does not divide by tensor=3"),
        (
            {"num_key_value_heads": 3},
            4,
            "tensor=4 ranks cannot share num_key_value_heads=3 of head_dim=24 evenly: "
            "choose a divisor of 3, or a multiple of it that divides 144",
        ),
        ({"num_key_value_heads": 1, "head_dim": 2}, 12, "tensor=12 ranks cannot share num_key_value_heads=1"),
    ],
)
def test_key_value_heads_that_ranks_cannot_share_are_named(sizes, tensor, message):
    config = tiny_config(num_attention_heads=12, **sizes)
    [problem] = layout_problems(ParallelConfig(tensor=tensor), shape_of(config))
    assert message in problem


@pytest.mark.parametrize("tensor", [3, 6, 12])
def test_layouts_that_the_remedy_names_are_accepted(tensor):
    config = tiny_config(num_attention_heads=12, num_key_value_heads=3, intermediate_size=96)
    assert layout_problems(ParallelConfig(tensor=tensor), shape_of(config)) == []


def test_a_vocabulary_too_small_for_its_ranks_is_refused():
    config = tiny_config(vocab_size=9, num_attention_heads=8, num_key_value_heads=8, head_dim=8)
    [problem] = layout_problems(ParallelConfig(tensor=8), shape_of(config))
    assert "vocab_size=9 leaves the last of tensor=8 ranks without a token" in problem


def test_a_vocabulary_is_padded_no_further_than_needed():
    assert [padded_vocabulary(vocab, 4) for vocab in (4, 5, 8)] == [4, 8, 8]


def test_a_model_is_refused_before_it_is_built():
    with pytest.raises(ConfigError, match="choose fewer"):
        build_chunks(tiny_config(), dtype=torch.float32, parallel=ParallelConfig(pipeline=3))
