"""What changed between two versions: exact to the bit, small, and refused whole when anything is wrong."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from bus.errors import StorageError
from storage.weights import deltas
from storage.weights import tensors as in_parts
from storage.weights.delta_format import MAGIC, DeltaHeader, PartChange, TensorChange, read_delta, write_delta
from storage.weights.deltas import apply_delta
from storage.weights.tensors import ITEM_BYTES, WORD, HostTensor, Weights, read_snapshot, snapshot_content
from tests.storage.weights.encoded import encode_delta

PARTS = [in_parts.PART_BYTES, 1000]
NAN = np.array([np.nan, 0.0, -0.0, np.inf], np.float32).view(np.uint32)


def tensor(words, dtype="BF16", shape=None):
    words = np.asarray(words, WORD[ITEM_BYTES[dtype]])
    return HostTensor(dtype, words.shape if shape is None else shape, words.reshape(-1))


def weights(version=0, **tensors):
    return Weights.of(version, tensors)


def same(one, other):
    return (
        one.policy_version == other.policy_version
        and one.digests == other.digests
        and one.digest() == other.digest()
        and one.tensors.keys() == other.tensors.keys()
        and all(
            one.tensors[name].same_kind(other.tensors[name])
            and one.tensors[name].words.tobytes() == other.tensors[name].words.tobytes()
            for name in one.tensors
        )
    )


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    seed = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    words = seed.integers(0, 256, int(np.prod(shape)) * ITEM_BYTES[dtype], dtype=np.uint8)
    return HostTensor(dtype, shape, words.view(WORD[ITEM_BYTES[dtype]]))


@st.composite
def versions(draw):
    """Any base, and what it may become: the same, some words of it, another tensor, nothing."""
    base = draw(st.dictionaries(st.text(max_size=6), tensors(), max_size=4))
    new = draw(st.dictionaries(st.text(max_size=6), tensors(), max_size=2))
    for name, old in base.items():
        kind = draw(st.sampled_from(["same", "some", "other", "gone"]))
        if kind == "other":
            new[name] = draw(tensors())
        elif kind != "gone":
            words = old.words.copy()
            if kind == "some" and len(words):
                at = draw(st.lists(st.integers(0, len(words) - 1), max_size=8))
                words[at] = draw(st.integers(0, 255))
            new[name] = HostTensor(old.dtype, old.shape, words)
    return base, new


@settings(max_examples=60)
@given(versions(), st.sampled_from([in_parts.PART_BYTES, 64, 8]))
def test_applying_a_delta_gives_the_new_weights_to_the_bit(pair, part_bytes):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(in_parts, "PART_BYTES", part_bytes)
        before, after = Weights.of(3, pair[0]), Weights.of(4, pair[1])
        delta = encode_delta(before, 4, after.tensors)
        assert same(delta.weights, after)
        assert same(apply_delta(before, delta.data), after)


@pytest.mark.parametrize("distance", [1, 255, 256, 257, 65535, 65536, 65537, 1_100_000])
def test_gaps_of_every_width_are_exact(distance):
    base = tensor(np.zeros(3 * distance + 2), "F32")
    words = base.words.copy()
    words[[0, distance, 2 * distance, 3 * distance + 1]] = NAN
    before, after = weights(0, w=base), weights(1, w=tensor(words, "F32"))
    assert same(apply_delta(before, encode_delta(before, 1, after.tensors).data), after)


def test_a_sign_of_zero_and_another_nan_are_changes_and_the_same_nan_is_none():
    rest = [0x3F80] * 9
    before = weights(0, w=tensor([0x7FC0, 0x0000, *rest]))
    assert encode_delta(before, 1, {"w": tensor([0x7FC0, 0x0000, *rest])}).sent_words == 0
    delta = encode_delta(before, 1, {"w": tensor([0x7FC1, 0x8000, *rest])})
    assert delta.sent_words == 2
    assert apply_delta(before, delta.data).tensors["w"].words.tolist() == [0x7FC1, 0x8000, *rest]


def test_a_digest_is_of_every_part_in_its_place(monkeypatch):
    monkeypatch.setattr(in_parts, "PART_BYTES", 1000)
    words = np.arange(2000)
    last, swapped = words.copy(), np.roll(words, 500)
    last[-1] += 1
    digests = {weights(0, w=tensor(found)).digests["w"] for found in (words, last, swapped)}
    assert len(digests) == 3


def test_what_does_not_change_costs_nothing():
    base = weights(0, **{f"layer.{n}": tensor(np.arange(1000)) for n in range(200)})
    nothing = encode_delta(base, 1, base.tensors)
    assert len(nothing.data) < 200
    after = apply_delta(base, nothing.data)
    assert after.policy_version == 1
    assert after.tensors["layer.7"] is base.tensors["layer.7"]


def test_one_changed_word_in_a_hundred_takes_less_than_a_hundredth_of_the_whole_as_learning_makes_them():
    seed = np.random.default_rng(0)
    whole = (seed.standard_normal(1 << 20) * 0.02).astype(np.float32).view(np.uint32) >> 16
    after = whole.copy()
    at = seed.random(len(after)) < 0.008
    after[at] += 1  # a step of one unit in the last place, as at lr 1e-6
    before = weights(0, w=tensor(whole))
    delta = encode_delta(before, 1, {"w": tensor(after)})
    assert len(delta.data) < 0.01 * before.size_bytes


def test_a_tensor_that_changed_everywhere_travels_whole_and_no_larger():
    seed = np.random.default_rng(0)
    before = weights(0, w=tensor(seed.integers(0, 1 << 16, 10_000)))
    after = weights(1, w=tensor(seed.integers(0, 1 << 16, 10_000)))
    delta = encode_delta(before, 1, after.tensors)
    assert len(delta.data) < before.size_bytes + 300
    assert same(apply_delta(before, delta.data), after)


def test_a_delta_that_grows_too_large_is_given_up_before_all_tensors_were_looked_at(monkeypatch):
    seed, looked_at, digest = np.random.default_rng(0), [], deltas.part_digest
    random = [tensor(seed.integers(0, 1 << 16, 10_000)) for _ in range(20)]
    before = weights(0, **{f"{n:02}": found for n, found in enumerate(random[:10])})
    after = {f"{n:02}": found for n, found in enumerate(random[10:])}
    size = len(encode_delta(before, 1, after).data)
    monkeypatch.setattr(deltas, "part_digest", lambda words: [looked_at.append(0), digest(words)][1])
    assert encode_delta(before, 1, after, most_bytes=size // 2) is None
    assert len(looked_at) < 7
    assert encode_delta(before, 1, after, most_bytes=size - 1) is None
    assert len(encode_delta(before, 1, after, most_bytes=size).data) == size


@pytest.mark.parametrize("part_bytes", PARTS)
def test_threads_change_nothing(part_bytes, monkeypatch):
    monkeypatch.setattr(in_parts, "PART_BYTES", part_bytes)
    before = weights(0, **{f"{n}": tensor(np.arange(5000) + n) for n in range(9)})
    after = {name: tensor(np.where(t.words % 97 == 0, 1, t.words)) for name, t in before.tensors.items()}
    with ThreadPoolExecutor(4) as threads:
        delta = encode_delta(before, 1, after, threads)
        assert delta.data == encode_delta(before, 1, after).data
        assert same(apply_delta(before, delta.data, threads), delta.weights)
        assert same(read_snapshot(b"".join(snapshot_content(before)), 0, threads), before)


# --- refusals ---


def one_step():
    """A base and a delta of it, one tensor sparse and one whole."""
    before = weights(0, a=tensor(np.arange(4000)), b=tensor(np.arange(50), "F32"))
    words = before.tensors["a"].words.copy()
    words[::100] += 1
    after = {"a": tensor(words), "b": tensor(np.arange(50) + 1, "F32")}
    return before, encode_delta(before, 1, after).data


@pytest.fixture
def step():
    """See `one_step`."""
    return one_step()


def test_another_base_is_refused(step):
    before, data = step
    other = Weights.of(0, before.tensors | {"a": tensor(np.arange(4000) + 1)})
    with pytest.raises(StorageError, match="does not apply to version 0"):
        apply_delta(other, data)
    with pytest.raises(StorageError, match="does not apply to version 5"):
        apply_delta(Weights.of(5, before.tensors), data)


@pytest.mark.parametrize("part_bytes", PARTS)
def test_every_flipped_bit_is_refused(part_bytes, monkeypatch):
    monkeypatch.setattr(in_parts, "PART_BYTES", part_bytes)
    before, data = one_step()
    expected = apply_delta(before, data)
    for place in range(len(data)):
        for bit in (1, 128):
            damaged = bytearray(data)
            damaged[place] ^= bit
            try:
                got = apply_delta(before, bytes(damaged))
            except StorageError:
                continue
            assert same(got, expected)  # a bit that says nothing, as one of zstd's header


def test_every_cut_is_refused(step):
    before, data = step
    for length in range(len(data)):
        with pytest.raises(StorageError):
            apply_delta(before, data[:length])
    with pytest.raises(StorageError, match="bodies"):
        apply_delta(before, data + b"x")


def test_a_delta_whose_bodies_lie_in_several_blobs_is_the_same(step):
    before, data = step
    header, bodies = read_delta(data)
    cut = [bytes(body) for body in bodies]
    begin = data[: len(data) - sum(map(len, cut))]
    expected = apply_delta(before, data)
    for n in range(len(cut) + 1):
        first, rest = begin + b"".join(cut[:n]), [b"".join(cut[n:]), b""]
        assert same(apply_delta(before, first, rest=rest), expected)
        if rest[0]:
            with pytest.raises(StorageError, match="bodies"):
                apply_delta(before, first + rest[0][:1], rest=[rest[0][1:]])
            with pytest.raises(StorageError, match="bodies"):
                apply_delta(before, first)
    assert len(cut) > 1
    assert header.changes


def test_a_snapshot_may_lie_in_several_files_that_have_different_tensors():
    tensors = {name: tensor(np.arange(10) + n) for n, name in enumerate("abc")}
    files = [b"".join(snapshot_content(weights(3, **{name: one}))) for name, one in tensors.items()]
    assert same(read_snapshot(files[0], 3, rest=files[1:]), weights(3, **tensors))
    with pytest.raises(StorageError, match="two files of a snapshot have a"):
        read_snapshot(files[0], 3, rest=files[:1])


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_as_a_delta_and_as_a_snapshot(data):
    base = weights(0, a=tensor(np.arange(10)))
    for bad in (data, MAGIC + data, MAGIC + len(data).to_bytes(4, "little") + data):
        with pytest.raises(StorageError):
            apply_delta(base, bad)
    with pytest.raises(StorageError):
        read_snapshot(data, 0)


def forged(base, content, **change):
    """A delta of one tensor "a", as somebody without good intentions would write it."""
    body = zstandard.ZstdCompressor().compress(content)
    of_part = {"number": 0, "changed": 1, "gap_bytes": 1, "body_bytes": len(body)}
    of_part |= {name: change.pop(name) for name in [*change] if name in of_part}
    fields = {"name": "a", "dtype": "BF16", "shape": (10,), "digest": bytes(16)}
    fields |= {"parts": (PartChange(**of_part),)} | change
    header = DeltaHeader(
        base_version=0, policy_version=1, base_digest=base.digest(), digest=bytes(16), removed=(),
        changes=(TensorChange(**fields),),
    )  # fmt: skip
    return write_delta(header, [body])


@pytest.mark.parametrize(
    ("content", "change", "reason"),
    [
        (bytes([9, 0, 0, 0, 0, 0]), {"changed": 2, "gap_bytes": 1}, "position 10 of 10"),
        (bytes([255] * 4 + [0, 0]), {"changed": 1, "gap_bytes": 4}, "position 4294967295 of 10"),
        (bytes(6), {"changed": 3, "gap_bytes": 1}, "a body of 6 bytes, not 9"),
        (bytes(3), {"changed": 1, "gap_bytes": 1, "dtype": "F16"}, "has no F16"),
        (bytes(3), {"changed": 1, "gap_bytes": 1, "name": "z"}, "has no BF16"),
        (bytes(3), {"changed": 1, "gap_bytes": 1}, "has not the digest"),
        (bytes(33), {"changed": 11, "gap_bytes": 1}, "are no change of"),
        (bytes(3), {"changed": 1, "gap_bytes": 3}, "are no change of"),
        (bytes(3), {"changed": 1, "gap_bytes": 0}, "are no change of"),
        (bytes(3), {"changed": -1, "gap_bytes": 1}, "are no change of"),
        (bytes(3), {"dtype": "F4"}, "is no tensor"),
        (bytes(8), {"changed": 4, "gap_bytes": 0, "shape": (-2, -2)}, "is no tensor"),
        (bytes(3), {"number": 1}, r"has no parts \[1\]"),
        (bytes(3), {"number": -1}, r"has no parts \[-1\]"),
        (bytes(3), {"parts": ()}, r"has no parts \[\]"),
        (
            bytes(3),
            {"parts": 2 * (PartChange(number=0, changed=1, gap_bytes=1, body_bytes=1),)},
            "has no parts",
        ),
        (b"", {"changed": 1 << 24, "gap_bytes": 0, "shape": (1 << 20, 1 << 20)}, "would add"),
        (
            bytes(2),
            {"gap_bytes": 0, "shape": (1 << 24, 0, 1), "changed": 0, "name": "z"},
            "a body of 2 bytes, not 0",
        ),
    ],
)
def test_forged_deltas_are_refused_with_their_reason(content, change, reason):
    base = weights(0, a=tensor(np.arange(10)))
    with pytest.raises(StorageError, match=reason):
        apply_delta(base, forged(base, content, **change))


def test_a_small_frame_that_would_unpack_to_a_gigabyte_is_not_opened():
    base = weights(0, a=tensor(np.arange(10)))
    bomb = forged(base, bytes(1 << 28), changed=10, gap_bytes=0)
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    with pytest.raises(StorageError, match="a body of 268435456 bytes, not 20"):
        apply_delta(base, bomb)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_tensor_named_twice_is_refused(step):
    before, data = step
    header, bodies = read_delta(data)
    twice = DeltaHeader(
        base_version=0, policy_version=1, base_digest=header.base_digest, digest=header.digest, removed=(),
        changes=(header.changes[0], header.changes[0]),
    )  # fmt: skip
    with pytest.raises(StorageError, match="one tensor twice"):
        apply_delta(before, write_delta(twice, 2 * [bytes(next(bodies))]))


# --- snapshots ---


def test_a_snapshot_is_a_safetensors_file_and_comes_back_to_the_bit():
    before = weights(7, a=tensor(np.arange(3), "U8"), b=tensor(NAN, "F32", (2, 2)), c=tensor([5], "F32", ()))
    data = b"".join(snapshot_content(before))
    assert same(read_snapshot(data, 7), before)
    read = load(data)
    assert read["b"].shape == (2, 2)
    assert read["b"].numpy().tobytes() == NAN.tobytes()
    assert read["c"].shape == ()


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}',
        b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F5","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}',
        b'{"a":7}',
        b"[]",
        b"{",
    ],
)
def test_malformed_snapshots_are_refused(header):
    with pytest.raises(StorageError, match="no safetensors file"):
        read_snapshot(len(header).to_bytes(8, "little") + header + bytes(8), 0)


def test_a_snapshot_that_claims_a_long_header_is_refused():
    with pytest.raises(StorageError, match="cannot have a header of"):
        read_snapshot((1 << 60).to_bytes(8, "little") + bytes(8), 0)
