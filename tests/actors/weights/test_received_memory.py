"""An actor keeps one set of the weights that it receives, which its engine uses in place."""

import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.engines.embedded.engine import EmbeddedEngine
from actors.settings.engines import EmbeddedEngineConfig
from actors.weights.received import Receiver, torch_tensors
from bus.messages import PolicyManifest
from learner.host_memory.copies import host_tensors
from storage.weights.blob_files import FileBlobs
from storage.weights.blob_sources import Blobs
from storage.weights.tensors import Weights, snapshot_content
from tests.actors.tiny import request

VERSIONS = 10


def tensors(model, version):
    """Every weight is another one in every version, but that of the last norm."""
    return {
        name: weight if name == "model.norm.weight" else weight + version / 1024
        for name, weight in model.state_dict().items()
    }


@pytest.fixture
def model():
    """36 MB in tensors of 1 to 4 MB: the C library keeps such pieces when they are freed."""
    config = Qwen3Config(
        vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, head_dim=32,
        num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM._from_config(config).eval()


@pytest.mark.slow
async def test_an_actor_keeps_one_set_of_weights_however_many_versions_come(model, tmp_path, monkeypatch):
    files = FileBlobs(tmp_path)
    blobs = [
        await files.put(
            snapshot_content(Weights.of(version, host_tensors(tensors(model, version)))), str(version)
        )
        for version in range(VERSIONS)
    ]
    size = blobs[0].size_bytes
    engine = EmbeddedEngine(model, EmbeddedEngineConfig())
    await engine.start()
    receiver, given, process = Receiver(Blobs(None)), {}, psutil.Process()
    expected = tensors(model, VERSIONS - 1)["model.embed_tokens.weight"].clone()
    resident = [process.memory_info().rss]
    for version, blob in enumerate(blobs):
        manifest = PolicyManifest(
            policy_version=version, incarnation="one", snapshot=blob, model=blob, stage="rl"
        )
        weights = await receiver.advance(manifest)
        await engine.load_weights(torch_tensors(weights.changed_since(given)), version)
        given = weights.digests
        del weights
        await engine.generate(request(str(version), (1, 2, 3), new=2))
        resident.append(process.memory_info().rss)
    await engine.close()
    assert torch.equal(model.model.embed_tokens.weight, expected)
    at_start, _, *later = resident  # the C library keeps what the engine began with until the second comes
    assert max(later) - at_start < 0.5 * size
    in_place = receiver.weights.tensors["model.embed_tokens.weight"].words.ctypes.data
    assert model.model.embed_tokens.weight.data_ptr() == in_place
    assert in_place % 64 == 0  # as processors like it
