"""A checkpoint of FSDP becomes a model directory that transformers and engines load."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from bus.errors import ConfigError, LostDataError
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.checkpoint.commit import save_checkpoint
from learner.config.lora import LoraConfig
from learner.config.optimizer import OptimizerConfig
from learner.convert.fsdp import fsdp_to_hf
from learner.convert.megatron import megatron_to_hf
from learner.data.packing import pack
from learner.initial.initial import as_reward_model
from learner.initial.scratch_model import character_tokenizer
from learner.model_directories.model_directory import HFWeights, load_tokenizer
from storage.disk.checkpoints import latest
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_config, tiny_model

pytestmark = pytest.mark.slow


def saved(root, family="qwen3", kind=FsdpTrainer, **settings):
    model = tiny_model(family)
    trainer = kind(model.config, hf_state(model), OptimizerConfig(lr=1e-2), **settings)
    trainer.train_step(pack(random_samples([9, 14, 5]), 100), TIS, policy_version=3)
    save_checkpoint(trainer, root, 1, {}, keep=1)
    return trainer


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_transformers_loads_the_weights_of_a_checkpoint_to_the_bit(tmp_path, family):
    trainer = saved(tmp_path / "checkpoints", family)
    done = fsdp_to_hf(tmp_path / "checkpoints", tmp_path / "hf", shard_bytes=50_000)
    assert done.tensors == len(trainer.export())
    assert len([*(tmp_path / "hf").glob("*.safetensors")]) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    found = hf_state(loaded)
    for name, weight in trainer.export().items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize(("kind", "convert"), [(FsdpTrainer, fsdp_to_hf), (Trainer, megatron_to_hf)])
def test_a_reward_model_stays_one_with_the_tokenizer_of_the_model_that_its_run_began_with(
    tmp_path, kind, convert
):
    model, tokenizer = tiny_model(vocab_size=259), character_tokenizer()
    begun_from = tmp_path / "policy"
    model.save_pretrained(begun_from)
    tokenizer.save_pretrained(begun_from)
    config, state = as_reward_model(model.config, HFWeights(begun_from), tokenizer, seed=0)
    trainer = kind(config, state, OptimizerConfig())
    save_checkpoint(trainer, tmp_path / "checkpoints", 1, {}, keep=1)
    convert(tmp_path / "checkpoints", tmp_path / "hf", begun_from=begun_from)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert torch.equal(loaded.score.weight, trainer.export()["score.weight"])
    assert load_tokenizer(tmp_path / "hf").get_vocab() == tokenizer.get_vocab()


def test_checkpoints_that_are_none_of_such_a_model_are_refused_and_leave_nothing(tmp_path):
    saved(tmp_path / "fsdp")
    saved(tmp_path / "megatron", kind=Trainer)
    saved(tmp_path / "adapters", lora=LoraConfig(rank=2))
    tiny_config(rms_norm_eps=0.1).save_pretrained(tmp_path / "other")
    target = tmp_path / "target"
    with pytest.raises(ConfigError, match="is Megatron's: convert it by `launch convert megatron-to-hf`"):
        fsdp_to_hf(tmp_path / "megatron", target)
    with pytest.raises(ConfigError, match="is FSDP's: convert it by `launch convert fsdp-to-hf`"):
        megatron_to_hf(tmp_path / "fsdp", target)
    with pytest.raises(ConfigError, match="adapters"):
        fsdp_to_hf(tmp_path / "adapters", target)
    with pytest.raises(ConfigError, match=r"of another model: rms_norm_eps is 1e-06, not 0\.1"):
        fsdp_to_hf(tmp_path / "fsdp", target, tmp_path / "other")
    [file] = latest(tmp_path / "fsdp").glob("*.distcp")
    torn = bytearray(file.read_bytes())
    torn[len(torn) // 2] ^= 1
    file.write_bytes(torn)
    with pytest.raises(LostDataError, match=f"the bytes of {file.name} are not those that were written"):
        fsdp_to_hf(tmp_path / "fsdp", target)
    assert not target.exists()
