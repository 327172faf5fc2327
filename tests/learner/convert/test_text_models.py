"""The text model inside a multimodal one is trained alone, and published alone or with the rest."""

import asyncio
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.embedded.prepared_weights import prepare_weights
from actors.settings.engines import EmbeddedEngineConfig
from bus.errors import ConfigError
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.weights.rank_weights import load_hf_weights
from learner.backends.model_loading import load_hf_directory
from learner.config.optimizer import OptimizerConfig
from learner.convert.text_directory import convert_text_model
from learner.data.packing import pack
from learner.model_directories.model_directory import HFWeights, load_hf_config, save_hf_directory
from learner.publication.host_copy import HostCopy
from learner.publication.whole_model import WholeModel
from storage.model_files.packed_files import bundle, with_config
from tests.learner.backends.model.built import build_model
from tests.learner.tiny import TIS, random_samples, reference_logits, tiny_config
from tests.learner.wrappers import WRAPPERS, save_wrapper

CASES = [("gemma3", {"tied": True}), ("kimi_k25", {}), ("qwen3_5_moe", {"stacked": True})]
MORE_CASES = [
    ("gemma3", {}),
    ("mistral3", {}),
    ("qwen3_5", {"tied": True}),
    ("qwen3_5", {}),
    ("qwen3_5_moe", {}),
]
SAMPLES = random_samples([5, 17, 2, 9])


def marked(by_day):
    """All types as parameters, of which some are tested by day."""
    return [pytest.param(kind, marks=() if kind in by_day else pytest.mark.slow) for kind in WRAPPERS]


def taken(copied):
    return {
        name: torch.from_numpy(tensor.words.view("float32").reshape(tensor.shape).copy())
        for name, tensor in asyncio.run(copied.arrived()).items()
    }


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("kind", "settings"), CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES]
)
@torch.no_grad()
def test_the_text_model_alone_is_what_the_whole_model_computes(tmp_path, kind, settings):
    whole = save_wrapper(kind, tmp_path / "whole", **settings)
    expected = reference_logits(whole, SAMPLES)
    converted = convert_text_model(tmp_path / "whole", tmp_path / "text")
    text, found = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(found.values())
    assert torch.equal(reference_logits(text.eval(), SAMPLES), expected)
    hf_config, state = load_hf_directory(tmp_path / "whole")
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == hf_config.model_type
    assert converted.tensors == len(state)
    written = HFWeights(tmp_path / "text")
    assert all(torch.equal(written[name], state[name]) for name in state)
    [batch] = pack(SAMPLES, 1000)
    ours = build_model(hf_config, dtype=torch.float32)
    load_hf_weights([ours], hf_config, state)
    assert (ours.logits(batch) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("kind", marked(("gemma3",)))
def test_a_step_is_published_alone_or_under_the_names_of_the_whole_model(tmp_path, kind):
    save_wrapper(kind, tmp_path)
    hf_config, state = load_hf_directory(tmp_path)
    trainer = FsdpTrainer(hf_config, state, OptimizerConfig(lr=1e-2, warmup_steps=0))
    trainer.train_step(pack(SAMPLES, 1000), TIS, policy_version=0)
    stored, whole = load_file(tmp_path / "model.safetensors"), WholeModel.of(tmp_path)
    host = HostCopy(torch.float32, whole)
    published = taken(host.take(trainer.exported()))
    assert published.keys() == stored.keys()
    inside = set(whole.names.values())
    assert all(torch.equal(published[name], stored[name]) for name in stored.keys() - inside)
    assert any(not torch.equal(published[name], stored[name]) for name in inside)
    trainer.train_step(pack(SAMPLES, 1000), TIS, policy_version=1)
    again = taken(host.take(trainer.exported()))
    assert all(torch.equal(again[name], stored[name]) for name in stored.keys() - inside)
    alone = taken(HostCopy(torch.float32).take(trainer.exported()))
    assert alone.keys() == set(state)
    assert all(torch.equal(again[whole.name(name)], tensor) for name, tensor in alone.items())
    assert dict(whole.streamed(trainer.streamed())).keys() == stored.keys()
    text = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).eval()
    served = {name: prepare_weights(text, each, complete=True) for name, each in (("a", again), ("b", alone))}
    assert served["a"].keys() == served["b"].keys()
    assert all(torch.equal(served["b"][name], tensor) for name, tensor in served["a"].items())


@pytest.mark.parametrize("kind", marked(("gemma3",)))
def test_the_embedded_engine_takes_the_whole_directory(tmp_path, kind):
    expected = reference_logits(save_wrapper(kind, tmp_path), SAMPLES)
    engine = EmbeddedEngine.from_directory(tmp_path, EmbeddedEngineConfig(dtype="float32"), policy_version=0)
    served = engine._decoder.model
    assert served.config.model_type == WRAPPERS[kind][1]
    assert torch.equal(reference_logits(served, SAMPLES), expected)


def test_engines_get_the_config_of_what_is_published(tmp_path):
    save_wrapper("gemma3", tmp_path)
    hf_config, _ = load_hf_directory(tmp_path)
    files = with_config(bundle(tmp_path), json.loads(hf_config.to_json_string()))
    described = json.loads(files.contents[files.names.index("config.json")])
    assert described["model_type"] == "gemma3_text"
    assert described["architectures"] == ["Gemma3ForCausalLM"]


def test_what_has_no_text_model_is_not_converted(tmp_path):
    config = tiny_config("llama")
    config.save_pretrained(tmp_path / "llama")
    with pytest.raises(ConfigError, match="llama, is of text alone: there is nothing to convert"):
        convert_text_model(tmp_path / "llama", tmp_path / "out")
    transformers.Glm4vConfig().save_pretrained(tmp_path / "glm4v")
    with pytest.raises(ConfigError, match="glm4v, has no text model that transformers builds without the re"):
        convert_text_model(tmp_path / "glm4v", tmp_path / "out")
    hf_config = transformers.AutoConfig.from_pretrained(tmp_path / "glm4v")
    with pytest.raises(ConfigError, match="no model of its text, a glm4v_text, alone; give a text mo"):
        FsdpTrainer(hf_config, {}, OptimizerConfig())
    assert not (tmp_path / "out").exists()


def test_a_whole_that_does_not_say_whether_heads_are_tied_goes_by_its_text_model(tmp_path):
    transformers.Blip2Config().save_pretrained(tmp_path)
    text = load_hf_config(tmp_path)
    assert (text.model_type, text.tie_word_embeddings) == (
        "opt",
        transformers.OPTConfig().tie_word_embeddings,
    )


def test_tensors_that_the_text_model_lacks_are_named(tmp_path):
    whole = save_wrapper("mistral3", tmp_path / "whole")
    state = load_file(tmp_path / "whole" / "model.safetensors")
    norm = next(name for name in state if name.endswith("model.norm.weight"))
    save_hf_directory(tmp_path / "less", whole.config, {n: t for n, t in state.items() if n != norm}, None)
    with pytest.raises(ConfigError, match=r"missing model\.norm\.weight \[64\]"):
        convert_text_model(tmp_path / "less", tmp_path / "out")
