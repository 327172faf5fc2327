from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from bus.errors import ConfigError
from learner.backends.factory import close_world, init_world
from learner.backends.megatron.trainer import Trainer
from learner.config.loss import SFTLoss
from learner.data.data_parallel import equally_many
from learner.data.packing import empty_micro_batch, pack, refuse_oversized
from tests.learner.checkpoint.saved_trainers import OPTIMIZER
from tests.learner.tiny import TIS, random_samples, tiny_model
from tests.learner.world.ranks_worker import LOSSES, found_by_rank, step


@pytest.mark.parametrize("loss", [TIS, SFTLoss()], ids=["tis", "sft"])
def test_empty_micro_batches_change_nothing(loss):
    batches = pack(random_samples([5, 17, 2]), 10)
    results = []
    for more in ([], [empty_micro_batch(), empty_micro_batch()]):
        model = tiny_model()
        trainer = Trainer(model.config, model.state_dict(), OPTIMIZER)
        result = trainer.train_step([*batches, *more], loss, policy_version=3)
        results.append((result, trainer.export()))
    (result, weights), (padded, padded_weights) = results
    assert padded == replace(result, computed_tokens=result.computed_tokens + 2)
    assert all(torch.equal(weights[name], padded_weights[name]) for name in weights)


def test_a_step_of_nothing_but_empty_micro_batches_is_skipped():
    model = tiny_model()
    trainer = Trainer(model.config, model.state_dict(), OPTIMIZER)
    result = trainer.train_step([empty_micro_batch()], TIS, policy_version=3)
    assert result.skipped
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in trainer.export().items())


def test_a_rank_without_groups_takes_an_empty_turn():
    assert equally_many(batches := pack(random_samples([5, 5, 5]), 5), dist.group.WORLD) == batches
    assert [batch.lengths for batch in equally_many([], dist.group.WORLD)] == [(1,)]


def test_a_trajectory_over_the_budget_is_refused_by_name_where_that_is_asked_for():
    samples = random_samples([5, 17, 2])
    assert len(pack(samples, 10)) == 2
    refuse_oversized(samples, 17)
    with pytest.raises(
        ConfigError, match=r"sample \d+ has 17 tokens, .*tokens_per_micro_batch is 10: raise it to 17"
    ):
        refuse_oversized(samples, 10)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_unequal_shares_and_idle_ranks_train_as_one_process_does(worlds, tmp_path, ranks):
    of_ranks = worlds.run(ranks, found_by_rank, tmp_path)
    assert len(of_ranks) == ranks
    for loss in LOSSES:
        alone = step(loss)
        for found in of_ranks:
            assert found[loss]["numbers"] == pytest.approx(alone["numbers"], rel=1e-5)
            assert found[loss]["batch_xxh3"] == alone["batch_xxh3"]
    assert [found["random"] for found in of_ranks] == [[0.0, 0.0, 0.0]] * ranks
    assert all(found["copied"] for found in of_ranks)
    assert len(of_ranks[0]["recorded"]) == 4  # what the first rank trains on
    assert [found["recorded"] for found in of_ranks[1:]] == [{}] * (ranks - 1)
    assert [found["whole"] for found in of_ranks] == ["step_00000001"] * ranks


def test_a_collective_waits_as_long_as_it_is_told():
    close_world()
    try:
        init_world(timeout_s=77)
        options = dist.group.WORLD._get_backend(torch.device("cpu")).options
        assert options._timeout.total_seconds() == 77
    finally:
        close_world()
        init_world()
