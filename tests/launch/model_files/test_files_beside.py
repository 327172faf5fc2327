"""Files of published directories beside a model's weights: which go along with it, and which are nobody's."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from actors.other_policies.opponent_weights import state_of_files
from learner.model_directories.model_directory import load_hf_config
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
