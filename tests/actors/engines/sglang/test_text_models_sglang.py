"""Real SGLang servers compute the text model of a multimodal one, alone or inside the whole, as trained."""

import asyncio
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from actors.engines.sglang.client.server_facts import ServerFacts
from bus.errors import ConfigError
from learner.backends.factory import close_world, init_world
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.model_loading import load_hf_directory
from learner.config.optimizer import OptimizerConfig
from learner.convert.text_directory import convert_text_model
from learner.data.packing import pack
from learner.publication.host_copy import HostCopy
from learner.publication.whole_model import WholeModel
from tests.actors.sglang_served import own_server
from tests.actors.tiny import request
from tests.learner.tiny import TIS, random_samples
from tests.learner.wrappers import save_wrapper

PROMPT = list(range(5, 25))


@pytest.fixture
def world():
    """A world of one rank, for a trainer."""
    init_world()
    yield
    close_world()


def published(trainer, whole=None):
    copied = asyncio.run(HostCopy(torch.float32, whole).take(trainer.exported()).arrived())
    return {
        name: torch.from_numpy(tensor.words.view("float32").reshape(tensor.shape).copy())
        for name, tensor in copied.items()
    }


def as_gemma_is_published(path):
    """Name the tensors of the vision tower as the files of Gemma 3 do, and transformers does no more."""
    named = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(named, path, metadata={"format": "pt"})


@pytest.mark.sglang
@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "tied", "parts"),
    [("gemma3", True, "left_out"), ("gemma3", True, "frozen"), ("mistral3", False, "left_out")],
)
async def test_a_server_computes_what_is_trained(world, tmp_path, kind, tied, parts):
    whole, text = tmp_path / "whole", tmp_path / "text"
    save_wrapper(kind, whole, tied=tied)
    if kind == "gemma3":
        as_gemma_is_published(whole / "model.safetensors")
    hf_config, state = load_hf_directory(whole)
    trainer = FsdpTrainer(hf_config, state, OptimizerConfig(lr=1e-2, warmup_steps=0))
    trainer.train_step(pack(random_samples([5, 17, 2, 9]), 1000), TIS, policy_version=0)
    alone = await asyncio.to_thread(published, trainer)
    weights, directory = alone, text
    if parts == "frozen":
        weights, directory = await asyncio.to_thread(published, trainer, WholeModel.of(whole)), whole
    else:
        convert_text_model(whole, text)
    async with own_server(directory, tmp_path) as engine:
        await engine.load_weights(weights, 1)
        found = await engine.generate(request("a", PROMPT, new=12))
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).eval()
    model.load_state_dict(alone, strict=False)
    tokens = torch.tensor([[*PROMPT, *found.token_ids.tolist()]])
    with torch.no_grad():
        logprobs = model(input_ids=tokens).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(1, tokens[0, len(PROMPT) :, None])[:, 0].numpy()
    np.testing.assert_allclose(found.logprobs, expected, atol=2e-6)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3_text", "tie_word_embeddings": False},
        {"model_type": "gemma3", "text_config": {"tie_word_embeddings": False}},
    ],
)
def test_an_output_layer_that_sglang_never_loads_is_refused(config):
    facts = ServerFacts(
        version="0.5.23", model="m", update_sessions=True, reports_spans=True, returns_experts=False,
        streams=True, tensor_ranks=1, settings=({},),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"output layer of its own .* does not load"):
        facts.refuse_model(config, "http://x")
    facts.refuse_model(json.loads('{"model_type": "gemma3_text"}'), "http://x")


def test_the_config_of_a_text_model_keeps_what_transformers_leaves_out(tmp_path):
    save_wrapper("qwen3_5", tmp_path)
    path = tmp_path / "config.json"
    described = json.loads(path.read_text())
    del described["text_config"]["layer_types"]
    described["text_config"]["full_attention_interval"] = 2
    path.write_text(json.dumps(described))
    hf_config, _ = load_hf_directory(tmp_path)
    assert json.loads(hf_config.to_json_string())["full_attention_interval"] == 2  # SGLang reads it
