"""Broadcast tensors are hashed while the next are received, and none is loaded before it has its digest."""

import json
import threading

import pytest
import torch

from actors.engines.sglang.in_server import sluice_digests

BUCKETS = [
    [("a", torch.arange(5.0)), ("b", torch.zeros(0))],
    [("c", torch.arange(7, dtype=torch.bfloat16))],
    [("d", torch.ones(3, 2).T)],
]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def load_weights(self, weights) -> None:
        self.loaded += [name for name, _ in weights]


def expecting(**others: str) -> Model:
    model = Model()
    digests = {name: sluice_digests._sha256(tensor) for bucket in BUCKETS for name, tensor in bucket}
    text = json.dumps(digests | others).encode()
    sluice_digests.expect_1(model, [("digests", torch.tensor(list(text), dtype=torch.uint8))])
    return model


def receive(model: Model) -> None:
    for bucket in BUCKETS:
        model.load_weights(bucket)


def test_a_bucket_is_hashed_while_the_next_is_received(monkeypatch: pytest.MonkeyPatch):
    model, received, sha256 = expecting(), threading.Event(), sluice_digests._sha256

    def hashed(tensor: torch.Tensor) -> str:
        assert received.wait(20), "it is hashed before the next bucket is received"
        return sha256(tensor)

    monkeypatch.setattr(sluice_digests, "_sha256", hashed)
    model.load_weights(BUCKETS[0])
    assert model.loaded == []
    received.set()
    model.load_weights(BUCKETS[1])
    assert model.loaded == ["a", "b"]
    model.load_weights(BUCKETS[2])
    assert model.loaded == ["a", "b", "c", "d"]
    model.load_weights([("e", torch.ones(1))])
    assert model.loaded[-1] == "e", "all that was offered has come"


@pytest.mark.parametrize(("other", "loaded"), [("a", []), ("c", ["a", "b"]), ("d", ["a", "b", "c"])])
def test_a_bucket_with_another_tensor_is_not_loaded(other: str, loaded: list[str]):
    model = expecting(**{other: "0" * 64})
    with pytest.raises(ValueError, match=f"not what the learner offered: {other}, whose SHA-256 is"):
        receive(model)
    assert model.loaded == loaded


def test_a_tensor_that_was_not_offered_is_not_loaded():
    model = expecting()
    model.load_weights([("stranger", torch.ones(1))])
    with pytest.raises(ValueError, match="stranger"):
        model.load_weights(BUCKETS[0])
    assert model.loaded == []
