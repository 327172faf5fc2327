"""Tests what each rank reads of the files of a model."""

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bus.errors import ConfigError
from learner.backends.megatron.model.model import build_chunks
from learner.backends.megatron.weights.rank_weights import load_hf_weights
from learner.config.parallel import ParallelConfig
from learner.model_directories.lazy_weights import LazyWeights, Spec
from learner.model_directories.model_directory import HFWeights
from tests.learner.backends.model.built import export_hf_weights
from tests.learner.division import divide_world
from tests.learner.tiny import hf_state, tiny_model


class Watched(LazyWeights):
    """Counts the elements that are read of each tensor."""

    def __init__(self, weights: HFWeights) -> None:
        super().__init__(weights)
        self._weights = weights
        self.read: dict[str, int] = {}

    def _counted(self, name: str, tensor: Tensor) -> Tensor:
        self.read[name] = self.read.get(name, 0) + tensor.numel()
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        return self._counted(name, self._weights[name])

    def part(self, name: str, dimension: int, start: int, stop: int) -> Tensor:
        return self._counted(name, self._weights.part(name, dimension, start, stop))

    def spec(self, name: str) -> Spec:
        return self._weights.spec(name)


def read_by_rank(directory, family, layout):
    """Elements read by name, elements of the parameters, and the weights that came out again."""
    parallel = ParallelConfig(**layout)
    divide_world(parallel)
    config = tiny_model(family).config
    chunks = build_chunks(config, dtype=torch.float32, parallel=parallel)
    watched = Watched(HFWeights(directory))
    load_hf_weights(chunks, config, watched)
    own = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    return watched.read, own, export_hf_weights(chunks, config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "foreign"),
    [
        ("qwen3", {"tensor": 2}, None),
        ("qwen3", {"pipeline": 2}, ("model.layers.1.", "model.layers.0.")),
        ("mixtral", {"expert": 2}, (".experts.2.", ".experts.1.")),
    ],
)
def test_a_rank_reads_nothing_but_its_own(worlds, tmp_path, family, layout, foreign):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    answers = worlds.run(2, read_by_rank, tmp_path, family, layout)
    whole = {name: tensor.numel() for name, tensor in hf_state(model).items()}
    for rank, (read, own, _) in enumerate(answers):
        assert sum(read.values()) == own < sum(whole.values())
        assert foreign is None or not any(foreign[rank] in name for name in read)
    exported = answers[0][2]
    assert all(torch.equal(exported[name], tensor) for name, tensor in hf_state(model).items())


def test_a_part_of_a_file_is_that_part_of_the_tensor(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    weights, name = HFWeights(tmp_path), "model.layers.0.mlp.down_proj.weight"
    for dimension, start, stop in ((0, 3, 10), (1, 0, 1), (1, 95, 96), (0, 64, 64)):
        expected = model.state_dict()[name].narrow(dimension, start, stop - start)
        assert torch.equal(weights.part(name, dimension, start, stop), expected)


def test_looking_for_what_does_not_fit_reads_nothing(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    watched = Watched(HFWeights(tmp_path))
    other = tiny_model(intermediate_size=80).config
    chunks = build_chunks(other, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"down_proj\.weight is \[64, 96\], not \[64, 80\]"):
        load_hf_weights(chunks, other, watched)
    assert not watched.read
    load_hf_weights(build_chunks(model.config, dtype=torch.float32), model.config, watched)
    assert watched.read == {name: math.prod(watched.spec(name).shape) for name in watched}


def test_quantized_weights_are_refused_by_name(tmp_path):
    model = tiny_model().bfloat16()
    name = "model.layers.1.mlp.up_proj.weight"
    state = {k: v.to(torch.float8_e4m3fn) if k == name else v for k, v in hf_state(model).items()}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name} is F8_E4M3, not one of F64, F32, F16, BF16"):
        load_hf_weights(build_chunks(model.config, dtype=torch.bfloat16), model.config, HFWeights(tmp_path))
