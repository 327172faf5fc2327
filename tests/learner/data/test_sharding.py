import pytest
import torch

from learner.backends.megatron.sharding import share_of_rank
from learner.data.packing import pack
from tests.learner.siblings import siblings
from tests.learner.tiny import random_samples

LENGTHS = [5, 17, 1, 32, 9]


@pytest.mark.parametrize("multiple", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_together_hold_every_token_once(ranks, multiple):
    [whole] = pack(random_samples(LENGTHS, temperatures=0.5), 1000)
    shares = [share_of_rank(whole, ranks=ranks, rank=rank, multiple=multiple) for rank in range(ranks)]
    assert len({len(share.tokens) for share in shares}) == 1
    assert len(shares[0].tokens) % multiple == 0
    found = {}
    for share in shares:
        assert share.lengths == shares[0].lengths
        for t in range(len(share.tokens)):
            key = int(share.sequence_of_token[t]), int(share.position_ids[t])
            assert key not in found
            found[key] = t, share
    for t in range(len(whole.tokens)):
        at, share = found.pop((int(whole.sequence_of_token[t]), int(whole.position_ids[t])))
        for name in ("tokens", "labels", "loss_mask"):
            assert getattr(share, name)[at] == getattr(whole, name)[t]
        for name, values in whole.streams.items():
            assert share.streams[name][at] == values[t]
    assert all(share.streams["temperatures"][at] == 1.0 for at, share in found.values())
    assert [share.denominator for share in shares] == [whole.denominator, *[0.0] * (ranks - 1)]
    assert not any(share.loss_mask[at] for at, share in found.values())


@pytest.mark.parametrize("multiple", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("lengths", [LENGTHS, [9, 8, 7, 6, 5, 4, 3, 2, 1, 40], [4], [3, 3, 3, 3]])
def test_short_sequences_are_whole_with_one_rank_and_every_token_is_with_one(lengths, ranks, multiple):
    [whole] = pack(random_samples(lengths, temperatures=0.5), 1000)
    shares = [
        share_of_rank(whole, ranks=ranks, rank=rank, multiple=multiple, min_tokens=20)
        for rank in range(ranks)
    ]
    tokens, holders = [], {}
    for rank, share in enumerate(shares):
        assert len(share.tokens) % multiple == 0
        assert len(share.tokens) > 0
        assert torch.equal(share.trained, share.loss_mask.nonzero()[:, 0])
        places = whole.cu_seqlens[share.sequence_of_token] + share.position_ids
        real = share.position_ids < torch.tensor(lengths)[share.sequence_of_token]
        for name in ("tokens", "labels", "loss_mask"):
            assert torch.equal(getattr(share, name)[real], getattr(whole, name)[places[real]])
        assert torch.equal(share.streams["advantages"][real], whole.streams["advantages"][places[real]])
        assert not share.loss_mask[~real].any()
        tokens += places[real].tolist()
        for sequence in share.sequence_of_token[real].tolist():
            holders.setdefault(sequence, set()).add(rank)
        assert len(share.lengths) == len(lengths)
        if share.cut is not None:
            assert share.cut == shares[0].cut
            assert sum(share.cut) // ranks + sum(share.whole) == len(share.tokens)
            assert torch.equal(share.cu_seqlens.diff(), torch.tensor(share.whole, dtype=torch.int32))
    assert sorted(tokens) == list(range(sum(lengths)))
    assert all(len(holders[i]) > 1 for i, length in enumerate(lengths) if length >= 20)
    assert [share.denominator for share in shares] == [whole.denominator, *[0.0] * (ranks - 1)]


def test_ranks_get_equal_shares_of_whole_sequences_and_the_rest_is_cut():
    def division(lengths):
        [whole] = pack(random_samples(lengths), 1000)
        shares = [share_of_rank(whole, ranks=2, rank=rank, min_tokens=20) for rank in range(2)]
        return shares[0].cut, [share.whole for share in shares]

    assert division([19, 10, 10]) == ((), [(19,), (10, 10)])
    assert division([30, 6, 4, 5, 5]) == ((32,), [(6, 4), (5, 5)])
    assert division([6, 6, 6]) == ((8,), [(6,), (6,)])
    assert division([19]) == (None, [(), ()])
    assert division([40, 19]) == (None, [(), ()])


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_has_as_much_to_attend_to_as_any_other(ranks):
    [whole] = pack(random_samples([64, 32]), 1000)
    shares = [share_of_rank(whole, ranks=ranks, rank=rank) for rank in range(ranks)]
    assert len({int(share.position_ids.sum()) for share in shares}) == 1


@pytest.mark.parametrize("multiple", [1, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_together_compute_a_tree_once_and_train_each_token_where_it_is_predicted(ranks, multiple):
    [whole] = pack(siblings(), 10**6, share_prefixes=True)
    shares = [share_of_rank(whole, ranks=ranks, rank=rank, multiple=multiple) for rank in range(ranks)]
    [computed] = {share.computed_tokens for share in shares}
    assert computed % multiple == 0
    assert 0 <= ranks * computed - whole.computed_tokens < 2 * ranks * multiple
    line = whole.tree.padded(2 * ranks * multiple).source
    for share in shares:
        held = torch.cat([torch.arange(run.start, run.stop) for run in share.tree.held])
        assert torch.equal(share.tree.source, line[held])
        assert torch.equal(held[share.predicting], whole.tree.computed[share.trained])
    assert torch.equal(torch.cat([share.trained for share in shares]).sort().values, whole.trained)
    assert [share.denominator for share in shares] == [whole.denominator, *[0.0] * (ranks - 1)]


def test_what_is_trained_is_what_the_mask_says():
    [whole] = pack(random_samples(LENGTHS), 1000)
    shares = [share_of_rank(whole, ranks=2, rank=rank) for rank in range(2)]
    for share in shares:
        assert torch.equal(share.trained, share.loss_mask.nonzero()[:, 0])
    assert sum(len(share.trained) for share in shares) == len(whole.trained)


def test_a_pack_that_needs_no_cutting_and_no_padding_is_left_alone():
    [whole] = pack(random_samples([3, 5]), 1000)
    assert share_of_rank(whole, ranks=1, rank=0, multiple=4) is whole
