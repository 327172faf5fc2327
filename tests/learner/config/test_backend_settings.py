"""Settings that a backend does not have are refused when the configuration is read, all at once."""

import pytest
from pydantic import ValidationError

from learner.config.learner import LearnerConfig


def test_fsdp_names_every_setting_that_it_does_not_have():
    with pytest.raises(ValidationError) as error:
        LearnerConfig.model_validate(
            {
                "backend": "fsdp",
                "parallel": {
                    "tensor": 2, "pipeline": 2, "context": 2, "expert": 4, "recompute": "selective",
                    "overlap_grad_reduce": True,
                },
                "optimizer": {"offload": 0.5, "offload_directory": "disk"},
                "advantage": {"type": "gae"},
            }
        )  # fmt: skip
    for problem in (
        "learner.parallel.tensor=2", "learner.parallel.pipeline=2", "learner.parallel.context=2",
        "learner.parallel.expert=4", "recompute=selective: set it to full or none", "reduce=true",
        "learner.optimizer.offload=0.5", "learner.optimizer.offload_directory=disk",
        "a critic: use an advantage without one",
    ):  # fmt: skip
        assert problem in str(error.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"parallel": {"distributed_optimizer": False}}, "distributed_optimizer=false"),
        ({"batch": {"share_prefixes": True}}, "share_prefixes=true: set it to false"),
        (
            {"lora": {"rank": 8, "weight_decomposed": True, "experts": True}},
            "no lengths of rows of experts; set one of them to false",
        ),
    ],
)
def test_fsdp_refuses_further_settings_of_megatron(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        LearnerConfig.model_validate({"backend": "fsdp", **settings})
    LearnerConfig.model_validate({"backend": "megatron", **settings})
    LearnerConfig.model_validate(
        {"backend": "fsdp", "parallel": {"recompute": "full"}, "optimizer": {"offload": 1}}
    )


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"backend": "megatron", "advantage": {"type": "gae"}},
            "learner.lora.rank=8 with a critic, which is trained as a whole",
        ),
        (
            {"lora": {"rank": 0, "alpha": 8.0}},
            "learner.lora.alpha=8.0 has no effect with learner.lora.rank=0",
        ),
        (
            {"reference": {"kl_coef": 0.1, "path": "elsewhere"}},
            "learner.reference.path=elsewhere: the reference is the policy with the adapter as it was",
        ),
        ({"teacher": {"path": "elsewhere"}}, "learner.teacher.path=elsewhere: .* serve it and name its url"),
        ({"teachers": {"math": {"path": "other"}}}, r"learner.teachers.math.path=other"),
    ],
)
def test_adapters_are_refused_where_they_are_not_to_be_had(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        LearnerConfig.model_validate({"backend": "fsdp", "lora": {"rank": 8}, **settings})


def test_the_scale_of_adapters_is_alpha_over_the_rank_or_over_its_root():
    lora = LearnerConfig.model_validate({"backend": "fsdp", "lora": {"rank": 16, "alpha": 8.0}}).lora
    assert lora.scale == 0.5
    assert lora.model_copy(update={"rank_stabilised": True}).scale == 2.0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"parallel": {"context_min_tokens": 4096}}, "context_min_tokens=4096 needs context > 1"),
        (
            {"parallel": {"context": 2, "context_min_tokens": 4096}, "batch": {"share_prefixes": True}},
            "share_prefixes=true cuts the line of all segments over context ranks",
        ),
    ],
)
def test_sequences_stay_whole_only_where_ranks_would_cut_them(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        LearnerConfig.model_validate(settings)
