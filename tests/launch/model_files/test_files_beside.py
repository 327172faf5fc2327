"""Files of published directories beside a model's weights: which go along with it, and which are nobody's."""

import os
import resource
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.embedded.prepared_weights import prepare_weights
from actors.other_policies.opponent_weights import state_of_files
from actors.settings.engines import EmbeddedEngineConfig
from bus.errors import ConfigError, EngineError
from learner.initial.scratch_model import character_tokenizer
from learner.model_directories.model_directory import copy_tokenizer, load_hf_config
from storage.model_files.model_reading import read_config, read_tokenizer
from storage.model_files.packed_files import bundle, unbundle
from tests.learner.tiny import hf_state, tiny_model


def test_other_safetensors_files_are_not_a_models_weights(tmp_path: Path):
    tiny_model("qwen3", tied=True).save_pretrained(tmp_path)
    head = torch.full_like(hf_state(tiny_model("qwen3", tied=True))["model.embed_tokens.weight"], 0.5)
    file = tmp_path / "model.safetensors"
    save_file({**state_of_files(tmp_path), "lm_head.weight": head}, file, metadata={"format": "pt"})
    expected = hf_state(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert torch.equal(expected["lm_head.weight"], head)
    save_file({"lm_head.weight": head + 1}, tmp_path / "older.safetensors")
    save_file({"output.weight": head}, tmp_path / "consolidated.safetensors")
    assert not load_hf_config(tmp_path).tie_word_embeddings
    found = state_of_files(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda m: changed_tensors(m, lambda t: t.pop("model.norm.weight")), "lack 1 weights.*model.norm"),
        (
            lambda m: changed_tensors(m, lambda t: t.update({"model.norm.weight": torch.ones(3)})),
            "lack 1 weights.*model.norm",
        ),
        (lambda m: (m / "model.safetensors").write_bytes(b"version https://git-lfs"), "cannot load.*header"),
        (lambda m: (m / "config.json").write_text('{"model_type": "mystery"}'), "cannot read.*mystery"),
    ],
    ids=["missing", "shape", "pointer", "type"],
)
def test_an_engine_of_a_spoilt_directory_is_refused_with_the_remedy(spoil, said: str, tmp_path: Path):
    tiny_model("qwen3").save_pretrained(tmp_path)
    EmbeddedEngine.from_directory(tmp_path, EmbeddedEngineConfig(), policy_version=0)
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=f"{said}.*download the directory again"):
        EmbeddedEngine.from_directory(tmp_path, EmbeddedEngineConfig(), policy_version=0)


def test_integers_are_no_weights_of_an_engine(tmp_path: Path):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    name, codes = "model.layers.0.mlp.up_proj.weight", torch.zeros(3, dtype=torch.int8)
    changed_tensors(tmp_path, lambda t: t.update({"rotary.position_ids": codes}))
    EmbeddedEngine.from_directory(tmp_path, EmbeddedEngineConfig(), policy_version=0)
    changed_tensors(tmp_path, lambda t: t.update({name: t[name].to(torch.int8)}))
    with pytest.raises(ConfigError, match=rf"{name} is I8, .*launch convert dequantise"):
        EmbeddedEngine.from_directory(tmp_path, EmbeddedEngineConfig(), policy_version=0)
    with pytest.raises(EngineError, match=rf"{name} is torch\.int8"):
        prepare_weights(model, {name: state_of_files(tmp_path)[name]}, complete=False)


def test_weights_that_cannot_be_read_are_refused_with_the_remedy(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(ConfigError, match=r"cannot read the weights.*header.*download"):
        state_of_files(tmp_path)


def changed_tensors(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = dict(state_of_files(model))
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_chat_templates_by_name_go_along_with_a_model(tmp_path: Path):
    tokenizer, source = character_tokenizer(), tmp_path / "source"
    template = tokenizer.chat_template
    tokenizer.chat_template = {"default": template, "tool_use": "{{ tools | tojson }}" + template}
    tokenizer.save_pretrained(source)
    tiny_model("qwen3").config.save_pretrained(source)
    (tmp_path / "copy").mkdir()
    copy_tokenizer(source, tmp_path / "copy")
    unbundle(bundle(source), tmp_path / "unpacked")
    for directory in (source, tmp_path / "copy", tmp_path / "unpacked"):
        found = AutoTokenizer.from_pretrained(directory, trust_remote_code=False).chat_template
        assert found == tokenizer.chat_template


def test_weights_in_whatever_format_are_not_packed_with_the_small_files(tmp_path: Path):
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    for name in ("tf_model.h5", "flax_model.msgpack", "model.onnx", "rust_model.ot", "model.onnx_data"):
        (tmp_path / name).write_bytes(b"weights")
    for name in ("tokenizer.json", "spiece.model", "vocab.txt", "chat_template.jinja"):
        (tmp_path / name).write_bytes(b"{}")
    assert bundle(tmp_path).names == (
        "chat_template.jinja", "config.json", "spiece.model", "tokenizer.json", "vocab.txt",
    )  # fmt: skip


@pytest.mark.parametrize("read", [read_config, read_tokenizer])
def test_a_host_without_descriptors_is_not_blamed_on_the_files(tmp_path: Path, read):
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    read(tmp_path)  # what it imports is there
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as lowest:  # noqa: PTH123 - its number is what counts
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno(), most))
        try:
            with pytest.raises(Exception) as raised:  # noqa: PT011 - libraries raise their own
                read(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))
    assert not isinstance(raised.value, ConfigError)
    assert "Too many open files" in "".join(traceback.format_exception(raised.value))
