import torch
from transformers import AutoModelForCausalLM

from learner.model_directory import HFWeights, save_hf_directory, stream_hf_directory
from tests.learner.tiny import hf_state, tiny_model


def test_weights_that_come_one_after_another_are_written_as_those_that_are_all_there(tmp_path):
    model = tiny_model()
    state, whole, streamed = hf_state(model), tmp_path / "whole", tmp_path / "streamed"
    shard_bytes = 3 * max(weight.nbytes for weight in state.values())
    save_hf_directory(whole, model.config, state, None, shard_bytes=shard_bytes)
    stream_hf_directory(streamed, model.config, iter(state.items()), None, shard_bytes=shard_bytes)

    files = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert len(files) > 4
    assert {path.name: path.read_bytes() for path in streamed.iterdir()} == files


def test_a_single_file_of_streamed_weights_is_loaded_by_transformers(tmp_path):
    model = tiny_model()
    reused = torch.empty(max(weight.numel() for weight in hf_state(model).values()))

    def one_buffer():
        for name, weight in hf_state(model).items():  # each is good until the next
            yield name, reused[: weight.numel()].copy_(weight.flatten()).view_as(weight)

    stream_hf_directory(tmp_path, model.config, one_buffer(), None)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    weights = HFWeights(tmp_path)
    assert all(torch.equal(weights[name], weight) for name, weight in hf_state(model).items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.state_dict().items())
