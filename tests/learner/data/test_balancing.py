import itertools
import random

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from bus.requests import GroupRef
from learner.data.balancing import balanced, forward_flops, group_flops
from learner.world.world import divided
from tests.learner.tiny import VOCAB, tiny_model


def dearest(costs, parts):
    return max(sum(costs[n] for n in part) for part in parts)


def cheapest_possible(costs, parts):
    """Find the best division by trying every one."""
    divisions = itertools.product(range(parts), repeat=len(costs))
    return min(
        max(sum(c for c, p in zip(costs, division, strict=True) if p == part) for part in range(parts))
        for division in divisions
    )


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_the_dearest_part_is_near_the_cheapest_possible(parts):
    draw = random.Random(parts)
    for _ in range(30):
        costs = [draw.randint(1, 100) for _ in range(draw.randint(0, 7))]
        found = balanced(costs, parts)
        assert sorted(n for part in found for n in part) == list(range(len(costs)))
        bound = 4 / 3 - 1 / (3 * parts)  # what the method guarantees at least
        assert dearest(costs, found) <= bound * cheapest_possible(costs, parts) + 1e-9


def test_karmarkar_and_karps_own_example():
    assert sorted(balanced([8, 7, 6, 5, 4], 2)) == [[0, 2], [1, 3, 4]]  # 14 and 16; 15 and 15 is possible


def test_equal_items_are_dealt_out_evenly_and_a_part_may_stay_empty():
    assert sorted(map(len, balanced([1.0] * 10, 4))) == [2, 2, 3, 3]
    assert sorted(balanced([5.0], 3)) == [[], [], [0]]
    assert balanced([3.0, 1.0], 1) == [[0, 1]]
    assert balanced([], 2) == [[], []]


def test_groups_stay_whole_and_each_goes_to_one_rank():
    groups = [GroupRef(lease_id=n, shard=0, tokens=100 * (n + 1)) for n in range(7)]
    shares = divided(groups, 3, lambda group: group.tokens)
    assert sorted(ref.lease_id for share in shares for ref in share) == list(range(7))
    assert [sum(ref.tokens for ref in share) for share in shares] == pytest.approx([933] * 3, abs=100)


def counted_flops(model, length):
    """Return what torch counts in the model itself, in which attention computes the masked half too."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long), use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("family", "head_size"), [("llama", 16), ("qwen3", 24), ("glm4_moe", 24), ("deepseek_v3", (32 + 20) / 2)]
)
def test_flops_are_those_that_torch_counts_but_for_the_masked_half(family, head_size):
    model, length = tiny_model(family, experts_implementation="eager"), 33  # torch counts no grouped product
    masked = 2 * 2 * 4 * 2 * head_size * length * (length - 1) / 2
    assert forward_flops(model.config, length) == counted_flops(model, length) - masked


def test_a_token_goes_through_its_chosen_experts_only():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    dense = transformers.Qwen3Config(**sizes, num_hidden_layers=2, vocab_size=VOCAB, intermediate_size=64)
    mixture = transformers.Qwen3MoeConfig(
        **sizes, num_hidden_layers=2, vocab_size=VOCAB, intermediate_size=64, mlp_only_layers=[0],
        moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    router = 2 * 64 * 8
    assert forward_flops(mixture, 1) == forward_flops(dense, 1) + router


def test_long_sequences_weigh_more_than_their_tokens():
    config = tiny_model("llama").config
    assert group_flops(config, 8 * 4096, 8) > 3 * group_flops(config, 32 * 512, 32)
