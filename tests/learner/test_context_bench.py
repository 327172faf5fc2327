import pytest

from launch.benchmarks.context import measured
from learner.backends.megatron.process_groups import divide_world
from learner.config.parallel import UNDIVIDED, ParallelConfig


def test_a_rank_by_itself_trains_on_the_same_batches_again():
    figures = measured("tiny", [40, 24], 64, 2, UNDIVIDED)
    assert figures["ranks"] == 1
    assert figures["tokens_per_s"] > 0
    assert len(set(figures["losses"])) == 3


def of_ranks(settings):
    parallel = ParallelConfig(context=2, **settings)
    divide_world(parallel)
    return measured("tiny", [40, 24, 100], 128, 2, parallel)


@pytest.mark.slow
def test_ranks_that_share_sequences_lose_the_same_whichever_way_they_do(worlds):
    expected = measured("tiny", [40, 24, 100], 128, 2, UNDIVIDED)["losses"]
    for settings in ({}, {"context_attention": "ring"}, {"context_min_tokens": 50}):
        for figures in worlds.run(2, of_ranks, settings):
            assert figures["losses"] == pytest.approx(expected, abs=1e-6)
            assert figures["ranks"] == 2
            assert len(figures["peak_gib_by_rank"]) == 2
