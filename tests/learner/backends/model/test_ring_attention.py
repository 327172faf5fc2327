"""Keys and values that pass from rank to rank, against attention over whole sequences."""

import json
import os
import subprocess
import sys

import pytest
import torch

from bus.errors import ConfigError
from learner.backends.factory import refuse_attention
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.config.parallel import ParallelConfig
from tests.learner.backends.model import ring_worker
from tests.learner.backends.model.ring_worker import (
    WIDTH,
    around,
    drawn,
    most_alive,
    of_whole_sequences,
    places,
    with_gradients,
)


def lengths_for(ranks: int) -> list[int]:
    return [2 * ranks * n for n in (1, 7, 2, 16, 3)]


def put_together(answers, lengths):
    """What the ranks have, in the order of the whole pack."""
    ranks = len(answers)
    order = torch.cat([places(lengths, ranks, rank) for rank in range(ranks)]).argsort()
    return [torch.cat(parts)[order] for parts in zip(*answers, strict=True)]


def expected(lengths, window, value_width):
    heads = drawn(lengths, value_width)
    return with_gradients(lambda *each: of_whole_sequences(*each, lengths, window), *heads)


@pytest.mark.parametrize("window", [None, 1, 3, 9, 30])
@pytest.mark.parametrize("value_width", [WIDTH, 10])
def test_a_ring_of_one_attends_to_what_it_has(window, value_width):
    lengths = lengths_for(1)
    found = around(lengths, window, value_width, torch.float64)
    for ours, exact in zip(
        put_together([found], lengths), expected(lengths, window, value_width), strict=True
    ):
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 3, 9, 30])
@pytest.mark.parametrize("value_width", [WIDTH, 10])
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.nightly)])
def test_output_and_gradients_are_those_of_whole_sequences(worlds, ranks, window, value_width):
    lengths = lengths_for(ranks)
    answers = worlds.run(ranks, around, lengths, window, value_width, torch.float64)
    whole = expected(lengths, window, value_width)
    for ours, exact in zip(put_together(answers, lengths), whole, strict=True):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_rank_holds_keys_and_values_of_two_others_at_most(worlds):
    for forward, both in worlds.run(4, most_alive, lengths_for(4)):
        assert forward == 2 * 2
        assert both == 2 * 2 + 2  # gradients that come in for this rank's own


def test_settings_without_a_way_to_attend_are_refused(monkeypatch):
    ring = {"context": 2, "context_attention": "ring"}
    with pytest.raises(ValueError, match="context_attention=ring needs context > 1"):
        ParallelConfig(context_attention="ring")
    with pytest.raises(ValueError, match="share_prefixes=true needs the keys of all ranks at once"):
        LearnerConfig(parallel=ring, batch={"share_prefixes": True})
    refuse_attention(ModelConfig(dtype="float32"), ParallelConfig(**ring))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"context_attention=ring .* model.dtype=float32 on a GPU"):
        refuse_attention(ModelConfig(dtype="float32"), ParallelConfig(**ring))
    refuse_attention(ModelConfig(dtype="bfloat16"), ParallelConfig(**ring))
    refuse_attention(ModelConfig(dtype="float32"), ParallelConfig(context=2))


# --- CUDA: `pytest -m gpu` and, for NCCL, `pytest -m multi_gpu` ---


def is_near(found, others, exact):
    """Tell whether each tensor is about as near the exact one as the other way's is."""
    return [
        float((ours.double() - exactly).norm() / exactly.norm())
        <= max(1.5 * float((theirs.double() - exactly).norm() / exactly.norm()), 4e-3)
        for ours, theirs, exactly in zip(found, others, exact, strict=True)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 64, 200])
@pytest.mark.parametrize("value_width", [64, 48])
def test_the_kernel_for_cuda_attends_to_each_block_within_the_error_of_bfloat16(window, value_width):
    lengths = [2, 300, 64, 1024]
    low = {"dtype": torch.bfloat16, "device": "cuda"}
    heads = drawn(lengths, value_width, width=64, **low)
    exact = [x.double() for x in heads]

    def whole(*each):
        return of_whole_sequences(*each, lengths, window)

    found = around(lengths, window, value_width, torch.bfloat16, width=64)
    theirs, exactly = ([x.cpu() for x in with_gradients(whole, *each)] for each in (heads, exact))
    assert is_near(put_together([found], lengths), theirs, exactly) == [True] * 4


@pytest.mark.multi_gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_over_nccl_the_ring_is_as_exact_as_gathered_keys_and_trains_alike():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, ring_worker.__file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    for name, (ring, gather) in report["errors"].items():
        for ours, theirs in zip(ring, gather, strict=True):
            assert ours <= max(1.5 * theirs, 4e-3), name
    for family, (ring, gather) in report["steps"].items():
        for (loss, norm), (other_loss, other_norm) in zip(ring, gather, strict=True):
            assert loss == pytest.approx(other_loss, abs=0.02), family
            assert norm == pytest.approx(other_norm, rel=0.05), family
