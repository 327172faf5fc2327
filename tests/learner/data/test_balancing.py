import itertools
import random

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from bus.images import ImageCount
from bus.requests import GroupRef
from learner.config.batch import BatchConfig
from learner.config.model import ScratchVision
from learner.data.balancing import GroupWork, balanced, forward_flops, tower_flops
from learner.data.packing import Sample, pack
from learner.model_directories.model_directory import load_hf_config
from learner.world.world import cost, divided
from storage.images.reader import ImageReader
from storage.shard.shared_prefixes import different_beginnings
from tests.learner.siblings import sample_of
from tests.learner.tiny import VOCAB, tiny_model
from tests.pictures import SIZES, older_vision_directory, picture, vision_directory


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


VISION = ScratchVision(layers=3, hidden_size=32, heads=2, intermediate_size=48)


def test_flops_of_images_are_those_that_torch_counts_in_the_tower_and_what_projects_them(tmp_path):
    directory = vision_directory(tmp_path / "model", sizes=SIZES.model_copy(update={"vision": VISION}))
    model = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager")
    reader = ImageReader.of(directory)
    images = [reader.read(picture(*size)) for size in ((16, 24), (40, 16), (8, 8))]
    assert [image.rows * image.columns for image in images] == [6, 10, 1]
    patches = torch.from_numpy(np.concatenate([reader.patches(image) for image in images]))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.get_image_features(patches, torch.tensor([reader.grid(image) for image in images]))
    found = forward_flops(model.config, 30, [6, 10, 1]) - forward_flops(model.config, 30)
    assert found == counter.get_total_flops()


def test_flops_of_images_in_windows_are_those_that_torch_counts_where_windows_are_whole(tmp_path):
    directory = older_vision_directory(tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager")
    reader = ImageReader.of(directory)
    images = [reader.read(picture(*size)) for size in ((16, 32), (48, 16), (16, 16), (8, 8))]
    assert [image.rows * image.columns for image in images] == [8, 12, 4, 1]  # a window has 2 x 2
    patches = torch.from_numpy(np.concatenate([reader.patches(image) for image in images]))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.get_image_features(patches, torch.tensor([reader.grid(image) for image in images]))
    found = forward_flops(model.config, 30, [8, 12, 4, 1]) - forward_flops(model.config, 30)
    assert found == counter.get_total_flops()


def test_flops_of_images_by_hand():
    sizes = {"in_channels": 3, "temporal_patch_size": 2, "patch_size": 4, "spatial_merge_size": 2}
    tower = transformers.Qwen3VLConfig().vision_config
    tower.update(
        sizes | {"hidden_size": 8, "intermediate_size": 16, "depth": 2, "num_heads": 2, "out_hidden_size": 10}
    )
    tower.deepstack_visual_indexes = [0]
    patch = 96 * 8 + 2 * (4 * 64 + 2 * 8 * 16)  # its embedding, and two layers
    merged = 2 * (32 * 32 + 32 * 10)  # of four patches, into the first layer and before it
    attention = 2 * 2 * 8  # two products of each pair in each of two layers
    assert tower_flops(tower, [4]) == 2 * (4 * patch + merged + 16 * attention)
    assert tower_flops(tower, [4, 8]) == 2 * (12 * patch + 3 * merged + (16 + 64) * attention)
    assert tower_flops(tower, []) == 0


def test_a_text_model_passes_no_images():
    config = tiny_model("llama").config
    assert forward_flops(config, 9, [4]) == forward_flops(config, 9)


def test_images_of_a_group_are_passed_once_in_each_micro_batch_that_it_takes_up(tmp_path):
    directory = vision_directory(tmp_path / "model")
    config = load_hf_config(directory)
    images = ImageCount(2, 20)
    text = GroupWork.of(8, 800, 0, 1000).forward_flops(config)
    once = GroupWork.of(8, 800, 0, 1000, images).forward_flops(config) - text
    assert once == forward_flops(config, 1, [10, 10]) - forward_flops(config, 1)
    for budget, passes in ((800, 1), (799, 2), (250, 4), (199, 8), (50, 8)):
        assert GroupWork.of(8, 800, 0, budget, images).forward_flops(config) - text == passes * once
    assert GroupWork.of(8, 800, 0, 1000, images) != GroupWork.of(8, 800, 0, 1000)


def test_a_rank_with_large_images_gets_fewer_groups(tmp_path):
    config = load_hf_config(vision_directory(tmp_path / "model"))
    batch = BatchConfig(tokens_per_micro_batch=BUDGET, balance="flops")
    large, small = ImageCount(1, 400), ImageCount(1, 4)
    groups = [
        GroupRef(lease_id=n, shard=0, tokens=4 * 420, images=large if n < 1 else small) for n in range(6)
    ]
    shares = divided(groups, 2, lambda group: cost(group, batch, config, 4))
    assert sorted(map(len, shares)) == [2, 4]
    [with_large] = [share for share in shares if groups[0] in share]
    assert len(with_large) == 2


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
    long, short = (GroupWork.of(n, 32768 // 2, 0, 1) for n in (4, 32))
    assert long.forward_flops(config) == 4 * forward_flops(config, 4096)
    assert long.forward_flops(config) > 3 * short.forward_flops(config)


BUDGET = 1000
"""Tokens of a micro-batch."""
SIBLINGS = 8


def group_of(number: int, prompt: int, answer: int) -> list[Sample]:
    """Siblings with a prompt and answers of so many tokens."""
    rng = np.random.default_rng(number)
    text = rng.integers(0, VOCAB, prompt)
    texts = [np.append(text, rng.integers(0, VOCAB, answer)) for _ in range(SIBLINGS)]
    return [sample_of(rng, each, number, (1.0,)) for each in texts]


def ref_of(number: int, group: list[Sample]) -> GroupRef:
    """What storage says of a group."""
    texts = [sample.token_ids for sample in group]
    return GroupRef(
        lease_id=number, shard=0, tokens=sum(map(len, texts)), computed_tokens=different_beginnings(texts)
    )


def computed(samples: list[Sample]) -> int:
    return sum(batch.computed_tokens for batch in pack(samples, BUDGET, share_prefixes=True))


@pytest.mark.parametrize(("prompt", "answer"), [(400, 20), (40, 60), (400, 200), (700, 300), (900, 200)])
def test_what_a_group_costs_is_what_packing_computes_of_it(prompt, answer):
    group = group_of(0, prompt, answer)
    found = cost(
        ref_of(0, group), BatchConfig(tokens_per_micro_batch=BUDGET, share_prefixes=True), None, SIBLINGS
    )
    assert found == pytest.approx(computed(group), abs=SIBLINGS)


@pytest.mark.parametrize("siblings", [1, 2])
def test_strands_that_share_the_turns_of_an_episode_cost_what_is_computed_of_them(siblings):
    batch, rng = BatchConfig(tokens_per_micro_batch=BUDGET, share_prefixes=True), np.random.default_rng(0)
    episodes = [rng.integers(0, VOCAB, 400) for _ in range(siblings)]
    group = [sample_of(rng, text[:turns], 0, (1.0,)) for text in episodes for turns in range(40, 401, 40)]
    found = cost(ref_of(0, group), batch, None, siblings)
    assert found == computed(group) == 400 * siblings


def test_work_of_shared_prompts_is_that_of_their_segments():
    config = tiny_model("llama").config
    [whole, prompt] = (forward_flops(config, length) for length in (100, 60))
    once = GroupWork.of(4, 4 * 100, 60 + 4 * 40, budget=1000)
    assert once.forward_flops(config) == pytest.approx(4 * whole - 3 * prompt)
    twice = GroupWork.of(4, 4 * 100, 60 + 4 * 40, budget=140)
    assert twice.forward_flops(config) == pytest.approx(4 * whole - 2 * prompt)
    apart = GroupWork.of(4, 4 * 100, 60 + 4 * 40, budget=50)
    assert apart.forward_flops(config) == pytest.approx(4 * whole)


@pytest.mark.parametrize("balance", ["tokens", "flops"])
def test_where_prefixes_are_shared_the_worst_rank_computes_less_than_if_lengths_were_balanced(balance):
    draw = random.Random(0)
    sizes = [(draw.choice((40, 400)), draw.choice((10, 60))) for _ in range(12)]
    groups = [group_of(n, *size) for n, size in enumerate(sizes)]
    refs = [ref_of(n, group) for n, group in enumerate(groups)]
    config = tiny_model("llama").config

    def worst_rank(*, share_prefixes: bool) -> int:
        batch = BatchConfig(tokens_per_micro_batch=BUDGET, share_prefixes=share_prefixes, balance=balance)
        shares = divided(refs, 3, lambda ref: cost(ref, batch, config, SIBLINGS))
        assert sorted(ref.lease_id for share in shares for ref in share) == list(range(len(groups)))
        return max(computed([s for ref in share for s in groups[ref.lease_id]]) for share in shares)

    least = sum(map(computed, groups)) / 3
    assert worst_rank(share_prefixes=True) < 1.05 * least
    assert worst_rank(share_prefixes=False) > 1.2 * least
