"""Resuming is gated on the trajectory: three steps, a checkpoint and three steps are six steps."""

import pytest

from tests.learner.checkpoint.resume_worker import (
    KINDS,
    first_half,
    found_by_rank,
    restored,
    second_half,
    whole,
)

IN_EVERY_RUN = ("main weights on the host",)
"""Kinds that are not marked slow; test_checkpoint.py has float32."""
NIGHTLY = ("on the host", "both", "muon, main weights", "fsdp, muon", "fsdp, all in bfloat16")
"""Kinds whose parts other kinds have too."""
ROUNDED = 2e-3
"""Says how far a world of another size departs where bfloat16 rounds what was added up in another order."""


def marked(kind: str, *marks: pytest.MarkDecorator) -> object:
    """Return a kind as a parameter, with `marks` and by when it is tested."""
    return pytest.param(kind, marks=[*marks, pytest.mark.nightly] if kind in NIGHTLY else marks)


@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.parametrize(
    "kind", [kind if kind in IN_EVERY_RUN else marked(kind, pytest.mark.slow) for kind in KINDS]
)
def test_one_rank_goes_on_as_if_it_had_not_stopped(tmp_path, kind):
    resumed = first_half(kind, tmp_path) + second_half(kind, tmp_path)
    for found, expected in zip(resumed, whole(kind), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def two_ranks(request, tmp_path_factory, worlds):
    """Return what two ranks found, what one found alone, and what they saved, two and one.

    It is of those kinds alone that are to be tested."""
    saved, root = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("one")
    tests = [item for item in request.session.items if "two_ranks" in getattr(item, "fixturenames", ())]
    kinds = sorted({item.callspec.params["kind"] for item in tests})
    alone = {kind: first_half(kind, root) + second_half(kind, root) for kind in kinds}
    return worlds.run(2, found_by_rank, saved, root, kinds)[0], alone, saved, root


@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [marked(kind) for kind in KINDS])
def test_two_ranks_go_on_as_if_they_had_not_stopped(two_ranks, kind):
    found = two_ranks[0][kind]
    for ours, expected in zip(found["halves"], found["whole"], strict=True):
        assert ours == pytest.approx(expected, abs=1e-5)


@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "bfloat16 moments", "fsdp"])
def test_another_number_of_ranks_goes_on_where_the_first_stopped(two_ranks, kind):
    found, alone, saved, _ = two_ranks
    tolerance = 1e-5 if kind in ("float32", "fsdp") else ROUNDED
    for resumed in (found[kind]["other's second half"], second_half(kind, saved)):
        for ours, expected in zip(resumed, alone[kind][3:], strict=True):
            assert ours == pytest.approx(expected, abs=tolerance)


@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [marked(kind) for kind in KINDS])
def test_another_number_of_ranks_has_the_same_weights_bit_for_bit(two_ranks, kind):
    found, _, saved, root = two_ranks
    assert found[kind]["restored"] == restored(kind, saved)
    assert found[kind]["other's restored"] == restored(kind, root)
