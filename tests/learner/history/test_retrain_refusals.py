import pytest

from bus.errors import ConfigError
from learner.config.lora import LoraConfig
from learner.config.mtp import MtpConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.publication import PublicationConfig
from learner.history.retrain import retrain_steps
from tests.learner.world.prefetch_settings import settings


@pytest.mark.parametrize("other", [LoraConfig(rank=4), LoraConfig(rank=4, targets=("q_proj",))])
def test_other_adapters_than_the_runs_are_refused_by_name(tmp_path, other):
    run = settings(tmp_path, 1)
    changed = run.learner.model_copy(update={"lora": other})
    with pytest.raises(ConfigError, match=r"learner\.lora\.rank=4.* was trained with rank=0"):
        next(retrain_steps(run, None, [], from_step=0, to_step=1, changed=changed))


def test_another_optimizer_than_the_runs_is_refused_by_name(tmp_path):
    run = settings(tmp_path, 1)
    changed = run.learner.model_copy(update={"optimizer": OptimizerConfig(matrices="muon")})
    with pytest.raises(
        ConfigError, match=r"learner\.optimizer\.matrices=muon: the run was trained with adamw"
    ):
        next(retrain_steps(run, None, [], from_step=0, to_step=1, changed=changed))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"backend": "fsdp"}, r"learner\.backend=fsdp: steps are trained again by the backend as"),
        ({"fp8_matmul": True}, r"learner\.fp8_matmul=true: steps"),
        ({"mtp": MtpConfig(weight=0.2)}, r"learner\.mtp\.weight=0\.2: steps"),
        (
            {"quantisation_aware": True, "publication": PublicationConfig(quantisation="int4")},
            r"learner\.quantisation_aware=true, learner\.publication\.quantisation=int4: steps",
        ),
    ],
)
def test_another_backend_or_precision_is_refused_before_anything_is_read(tmp_path, changes, said):
    run = settings(tmp_path, 1)
    changed = run.learner.model_copy(update=changes)
    with pytest.raises(ConfigError, match=said):
        next(retrain_steps(run, None, [], from_step=0, to_step=1, changed=changed))
