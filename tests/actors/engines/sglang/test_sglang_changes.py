"""What changed in weights goes into a file, and from there into the parameters of a model like SGLang's."""

import gc
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from actors.engines.sglang.changes import FARTHEST, changes, takes_changes
from actors.engines.sglang.client.preparation import prepared
from actors.engines.sglang.in_server import sluice_changes
from actors.engines.sglang.in_server.sluice_changes import APPLY, READY, SOCKETS
from actors.engines.sglang.weights import HeldWeights
from tests.actors.sglang_stand_in import later

BIG, LENGTH = 64, 96


class Fused(torch.nn.Module):
    """Has its parameters as SGLang has them: fused and cut for rank 1 of 2, transposed, in two places."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(BIG, LENGTH, dtype=dtype))
        self.down = torch.nn.Parameter(torch.zeros(LENGTH, BIG, dtype=dtype))
        self.stacked = torch.nn.Parameter(torch.zeros(2 * BIG, LENGTH, dtype=dtype))
        self.embed = torch.nn.Parameter(torch.zeros(LENGTH, BIG, dtype=dtype))
        self.head = torch.nn.Parameter(torch.zeros(LENGTH, BIG, dtype=torch.float32))
        self.scale = torch.nn.Parameter(torch.zeros(1, dtype=dtype))

    def load_weights(self, weights) -> None:
        both = {}
        for name, tensor in weights:
            match name:
                case "q" | "k":
                    half = BIG // 2
                    self.qk.data.narrow(0, half * (name == "k"), half).copy_(tensor.narrow(0, half, half))
                case "down":
                    with ThreadPoolExecutor(1) as pool:  # as for DeepSeek
                        pool.submit(self.down.data.copy_, tensor.t()).result()
                case "a" | "b":
                    both[name] = tensor
                    if len(both) == 2:
                        self.stacked.data.copy_(torch.cat([both["a"], both["b"]]))
                case "embed":
                    self.embed.data[3:] = tensor[3:]  # as for convolutions of linear attention
                    self.embed.data[:3].copy_(tensor[:3])
                    self.head.data.copy_(tensor)
                case "scale":
                    self.scale.data.fill_(tensor.item())
                case _:
                    raise AssertionError(name)


def policy(dtype):
    shapes = dict.fromkeys("qkab", (BIG, LENGTH)) | {
        "down": (BIG, LENGTH),
        "embed": (LENGTH, BIG),
        "scale": (1,),
    }
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def loaded(state, dtype, of_class=Fused):
    model = of_class(dtype)
    model.load_weights(state.items())
    return model


def apply(model, file):
    path = torch.frombuffer(bytearray(str(file).encode()), dtype=torch.uint8)
    sluice_changes.apply_2(model, [("path", path)])


def same_bits(one, other):
    return all(
        torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        for mine, theirs in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


OURS = {"custom_weight_loader": ["mine.load", APPLY], "dp_size": 1, "quantization": None}
WITH_DRAFT = {
    "speculative_algorithm": "EAGLE",
    "speculative_draft_model_path": "/draft",
    "model_path": "/policy",
}


@pytest.mark.parametrize(
    ("server", "model_type", "sessions", "takes"),
    [
        (OURS, "qwen3", False, True),
        (OURS, "qwen3_moe", True, True),
        (OURS, "qwen3_moe", False, False),
        (OURS, "mamba2", True, False),
        (OURS | {"custom_weight_loader": None}, "qwen3", True, False),
        (OURS | {"custom_weight_loader": ["mine.load"]}, "qwen3", True, False),
        (OURS | {"quantization": "fp8"}, "qwen3", True, False),
        (OURS | {"speculative_algorithm": "EAGLE"}, "qwen3", True, False),
        (OURS | {"speculative_algorithm": "NGRAM"}, "qwen3", True, True),
        (OURS | WITH_DRAFT, "qwen3", False, True),
        (OURS | WITH_DRAFT, "qwen3_moe", False, False),
        (OURS | WITH_DRAFT | {"model_path": "/draft"}, "qwen3", True, False),
        (OURS | WITH_DRAFT | {"quantization": "fp8"}, "qwen3", True, False),
        (OURS | {"cpu_offload_gb": 4}, "qwen3", True, False),
        (OURS | {"dp_size": 2}, "qwen3", True, False),
        (OURS | {"dp_size": 2, "enable_dp_attention": True}, "qwen3", True, True),
        ({}, "qwen3", True, False),
    ],
)
def test_changes_are_for_servers_that_have_weights_as_they_are_loaded(server, model_type, sessions, takes):
    assert takes_changes(server, model_type, update_sessions=sessions) is takes


@pytest.fixture
def held(tmp_path):
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    (model_dir / "config.json").write_text(json.dumps({"architectures": ["Fused"]}))
    weights = HeldWeights(model_dir, tmp_path / "weights")
    yield weights
    weights.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("piece", "taken"), [(None, None), (5 * LENGTH, 1), (BIG * LENGTH, 300)])
def test_a_model_that_takes_changes_is_as_one_that_took_all(held, dtype, piece, taken, monkeypatch):
    monkeypatch.setattr(sluice_changes, "PIECE_ELEMENTS", piece or sluice_changes.PIECE_ELEMENTS)
    monkeypatch.setattr(sluice_changes, "TAKEN_ELEMENTS", taken or sluice_changes.TAKEN_ELEMENTS)
    torch.manual_seed(0)
    first = policy(dtype)
    model = loaded(first, dtype)
    held.keep(first, 0)
    for version in (1, 2, 3):
        state = later(held.tensors, 0.02)
        file = held.write_changes(state)
        assert file is not None
        assert file.stat().st_size < 0.2 * sum(tensor.nbytes for tensor in state.values()) + 2000
        apply(model, file)
        held.keep(state, version)
        assert same_bits(model, loaded(state, dtype))


def taught(held):
    """Return a model for which it is known where elements belong, and what it has."""
    torch.manual_seed(0)
    first = policy(torch.float32)
    model = loaded(first, torch.float32)
    held.keep(first, 0)
    apply(model, held.write_changes(second := later(first, 0.02)))
    held.keep(second, 1)
    return model, second


def noted_loads(model):
    """Return a list that will have the names of what the model itself loads."""
    names, load = [], model.load_weights
    model.load_weights = lambda weights: load((names.append(name), (name, new))[1] for name, new in weights)
    return names


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_what_a_model_copies_is_written_without_it_from_then_on(held, device):
    torch.manual_seed(0)
    first = policy(torch.bfloat16)
    model = loaded(first, torch.bfloat16).to(device)
    by_model = noted_loads(model)
    held.keep(first, 0)
    for version in (1, 2, 3, 4):
        state = later(held.tensors, 0.02) | ({} if version % 2 else {"scale": first["scale"]})
        file = held.write_changes(state)
        await prepared(file)
        apply(model, file)
        held.keep(state, version)
        assert same_bits(model, loaded(state, torch.bfloat16).to(device))
    assert sorted(by_model) == sorted([*first, *(name for name in "ab" for _ in range(3)), *["scale"] * 3])


async def test_what_was_prepared_is_not_read_again(held):
    torch.manual_seed(0)
    first = {name: tensor for name, tensor in policy(torch.bfloat16).items() if name in ("q", "k", "down")}
    model = loaded(first, torch.bfloat16)
    held.keep(first, 0)
    apply(model, held.write_changes(second := later(first, 0.02)))
    held.keep(second, 1)
    file = held.write_changes(third := later(second, 0.02))
    (held.directory / SOCKETS.replace("*", "1")).touch()  # of a process that has ended
    await prepared(file)
    file.write_bytes(b"")
    apply(model, file)
    wanted = Fused(torch.bfloat16)
    wanted.load_weights(third.items())
    assert same_bits(model, wanted)


def test_changes_that_are_to_be_written_do_not_wait_for_a_preparation(held, monkeypatch):
    model, second = taught(held)
    file = held.write_changes(third := later(second, 0.02))
    places, has_begun = sluice_changes._places_of(model), threading.Event()
    writes = places._writes

    def slow(*given):
        for write in writes(*given):
            if not has_begun.is_set():
                has_begun.set()
                places._writing.wait(20)
            yield write

    monkeypatch.setattr(places, "_writes", slow)
    with ThreadPoolExecutor(1) as thread:
        preparing = thread.submit(places.prepare, model, file)
        assert has_begun.wait(20)
        apply(model, file)
        assert preparing.result(20) == sluice_changes.GIVEN_UP
    assert same_bits(model, loaded(third, torch.float32))


async def test_a_process_that_prepares_gets_the_interpreter_at_once(held, monkeypatch):
    torch.manual_seed(0)
    model = loaded(first := policy(torch.float32), torch.float32)
    held.keep(first, 0)
    apply(model, held.write_changes(later(first, 0.02)))
    seen, usual_s = [], sys.getswitchinterval()
    monkeypatch.setattr(
        sluice_changes._Places, "prepare", lambda *_: (seen.append(sys.getswitchinterval()), READY)[1]
    )
    await prepared(held.directory / "changes-1.safetensors")
    assert seen == [pytest.approx(sluice_changes.SWITCH_S)]
    assert sys.getswitchinterval() == pytest.approx(usual_s)


def test_a_file_that_was_prepared_in_vain_changes_nothing(held):
    model, second = taught(held)
    in_vain = held.write_changes(later(second, 0.02))
    assert sluice_changes._places_of(model).prepare(model, in_vain) == READY
    apply(model, held.write_changes(third := later(second, 0.03)))
    assert same_bits(model, loaded(third, torch.float32))


def test_changes_are_not_written_where_a_parameter_was(held):
    torch.manual_seed(0)
    first = policy(torch.float32)
    model = loaded(first, torch.float32)
    by_model = noted_loads(model)
    held.keep(first, 0)
    for version in (1, 2, 3):
        file = held.write_changes(state := later(held.tensors, 0.02))
        sluice_changes._places_of(model).prepare(model, file)
        model.qk.data = model.qk.data.clone()
        apply(model, file)
        held.keep(state, version)
        assert same_bits(model, loaded(state, torch.float32))
    assert by_model == 3 * list(by_model[: len(first)])


class Summing(Fused):
    def __init__(self, dtype) -> None:
        super().__init__(dtype)
        self.register_buffer("sum", torch.zeros(()))

    def load_weights(self, weights) -> None:
        super().load_weights(weights)
        self.sum = self.qk.float().sum()


class Doubling(Fused):
    """Changes what it has copied in a way that torch does not see."""

    def load_weights(self, weights) -> None:
        for one in weights:
            super().load_weights([one])
            if one[0] == "q":
                self.qk.data.numpy()[: BIG // 2] *= 2


def test_a_model_that_computes_from_what_it_loaded_loads_it_each_time(held):
    torch.manual_seed(0)
    first = policy(torch.float32)
    model = loaded(first, torch.float32, Summing)
    held.keep(first, 0)
    for version in (1, 2, 3):
        apply(model, held.write_changes(state := later(held.tensors, 0.02)))
        held.keep(state, version)
        assert torch.equal(model.sum, loaded(state, torch.float32, Summing).sum)


def test_places_that_have_other_elements_than_came_are_not_known(held):
    torch.manual_seed(0)
    first = policy(torch.float32)
    model = loaded(first, torch.float32, Doubling)
    held.keep(first, 0)
    apply(model, held.write_changes(later(first, 0.02)))
    known = sluice_changes._places_of(model)._known
    assert sorted(known) == ["down", "embed", "k"]


@pytest.mark.parametrize("far", [FARTHEST - 1, FARTHEST, FARTHEST + 1, 2 * FARTHEST, 3 * FARTHEST + 5])
def test_elements_that_lie_far_apart_are_found_again(held, far):
    first = {"embed": torch.arange(4.0 * FARTHEST)}
    model = torch.nn.Module()
    model.embed = torch.nn.Parameter(first["embed"].clone())
    model.load_weights = lambda weights: [model.embed.data.copy_(tensor) for _, tensor in weights]
    held.keep(first, 0)
    state = {"embed": first["embed"].clone()}
    state["embed"][[7, 7 + far, 4 * FARTHEST - 1]] -= 0.5
    apply(model, held.write_changes(state))
    assert torch.equal(model.embed, state["embed"])


def test_negative_zeros_and_infinities_are_changes_like_others(held):
    first = {"embed": torch.zeros(LENGTH, BIG)}
    model = Fused(torch.float32)
    held.keep(first, 0)
    state = {"embed": first["embed"].clone()}
    state["embed"][3, 4], state["embed"][5, 6] = -0.0, torch.inf
    apply(model, held.write_changes(state))
    assert torch.equal(model.embed.view(torch.int32), state["embed"].view(torch.int32))


def test_tensors_that_changed_much_go_whole_beside_those_that_did_not(held):
    torch.manual_seed(0)
    first = policy(torch.float32)
    model = loaded(first, torch.float32)
    held.keep(first, 0)
    state = later(first, 0.01) | {"down": torch.randn(BIG, LENGTH)}
    apply(model, held.write_changes(state))
    assert same_bits(model, loaded(state, torch.float32))


PIECE = 50
TALL, WIDE = (30, 10), (4, 2 * PIECE)
NARROW = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.randn(()), torch.randn(())),
        (torch.randn(()), torch.tensor(torch.nan)),
        (torch.randn(TALL), torch.randn(TALL)),
        (torch.randn(TALL).t(), torch.randn(TALL).t()),
        (torch.randn(TALL)[:, 3:7], torch.randn(30, 4)),
        (torch.randn(TALL), torch.randn(1, 10)),
        (torch.randn(TALL), torch.randn(())),
        (torch.randn(WIDE), torch.randn(WIDE)),
        (torch.randn(TALL), torch.randn(TALL).bfloat16()),
        (torch.randn(TALL).bfloat16(), torch.randn(TALL)),
        (torch.randn(TALL).to(NARROW), torch.randn(TALL).bfloat16()),
        (torch.randint(100, TALL), torch.randint(100, TALL).float()),
        (torch.randn(TALL), torch.randint(100, TALL)),
        (torch.randn(0, 3), torch.randn(0, 3)),
    ],
)
def test_copying_is_as_ever_but_for_nan(target, source, monkeypatch):
    monkeypatch.setattr(sluice_changes, "PIECE_ELEMENTS", PIECE)
    if source.is_floating_point() and source.numel() > 1:
        source[source.float() < 0] = torch.nan
    keeps = source.isnan().expand_as(target)
    expected = torch.where(keeps, target.double(), target.clone().copy_(source).double())
    with torch.no_grad(), sluice_changes._NanChangesNothing():
        assert target.copy_(source) is target
    assert torch.equal(target.double(), expected)


def test_where_nothing_changed_there_is_a_file_all_the_same(held):
    first = policy(torch.float32)
    model = loaded(first, torch.float32)
    held.keep(first, 0)
    apply(model, held.write_changes({name: first[name] for name in ("scale", "q", "k")}))
    assert same_bits(model, loaded(first, torch.float32))


def test_what_is_large_or_cannot_be_told_from_no_change_is_not_written_so(held):
    torch.manual_seed(0)
    first = policy(torch.float32)
    held.keep(first, 0)
    assert held.write_changes(policy(torch.float32)) is None
    state = {"q": first["q"].clone()}
    state["q"][1, 2] = torch.nan
    assert changes(first, state) is None
    assert held.write_changes(state) is None


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_nan_is_not_written_so(dtype, whole):
    old = {"q": torch.ones(100), "other": torch.ones(1000)}
    old = {name: tensor.to(dtype) for name, tensor in old.items()}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["q"][: 90 if whole else 3] = torch.tensor(2.0).to(dtype)
    assert changes(old, new) is not None
    new["q"][1] = torch.tensor(torch.nan).to(dtype)
    assert changes(old, new) is None


class Assigning(Fused):
    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            assert name == "embed"
            self.assign(tensor)

    def assign(self, tensor) -> None:
        self.embed.data = tensor.clone()


class AssigningElements(Assigning):
    def assign(self, tensor) -> None:
        self.embed.data[torch.arange(LENGTH)] = tensor


@pytest.mark.parametrize("of_class", [Assigning, AssigningElements])
def test_a_model_that_does_not_copy_is_refused_and_says_what_to_do(held, of_class):
    first = {"embed": torch.randn(LENGTH, BIG)}
    model = loaded(first, torch.float32, of_class)
    held.keep(first, 0)
    file = held.write_changes(later(first, 0.01))
    with pytest.raises(RuntimeError, match=rf"{of_class.__name__} does not copy .*embed.*changes alone"):
        apply(model, file)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_looked_for_while_generation_stands_still(held, enabled):
    first = {"embed": torch.randn(LENGTH, BIG)}
    meanwhile = []

    class Failing(torch.nn.Linear):
        def load_weights(self, weights):
            meanwhile.append(gc.isenabled())
            raise ValueError("no such weights")

    held.keep(first, 0)
    file = held.write_changes(later(first, 0.01))
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="no such weights"):
            apply(Failing(2, 2), file)
        assert meanwhile == [False]
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_a_parameter_that_had_a_nan_before_says_nothing(held):
    first = {"embed": torch.randn(LENGTH, BIG)}
    model = Fused(torch.float32)
    model.embed.data.copy_(first["embed"])
    model.qk.data[0, 0] = torch.nan
    held.keep(first, 0)
    state = later(first, 0.01)
    apply(model, held.write_changes(state))
    assert torch.equal(model.embed, state["embed"])
