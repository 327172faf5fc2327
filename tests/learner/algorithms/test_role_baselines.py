"""Role-conditioned advantages, whose baselines are kept from step to step."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bus.errors import ConfigError
from learner.algorithms.advantages.rae import rae_advantages
from learner.distributed.exact_sums import exact_sums
from learner.progress.progress import Progress
from tests.learner.algorithms.rewarded import group
from tests.learner.algorithms.virtual_ranks import Ranks


def rae(groups, baselines, decay=0.5, metadata_key=None, sums=exact_sums):
    return rae_advantages(groups, decay=decay, metadata_key=metadata_key, sums=sums, baselines=baselines)


def game(first: float, second: float, lease: int = 0, **changes):
    """A game of two roles, played once."""
    made = group(first, second, lease=lease, **changes)
    return [replace(t, agent=role, rollout=0) for t, role in zip(made, ("white", "black"), strict=True)]


def test_by_hand():
    baselines: dict[str, float] = {}
    assert rae([game(1.0, -1.0)], baselines) == [[1.0, -1.0]]
    assert baselines == {"default/white": 0.5, "default/black": -0.5}
    assert rae([game(1.0, -1.0)], baselines) == [[0.5, -0.5]]
    assert baselines == {"default/white": 0.75, "default/black": -0.75}


def test_games_of_a_step_are_one_after_the_other_where_their_rewards_are_equal():
    together: dict[str, float] = {"default/white": 0.3}
    apart = dict(together)
    rae([game(0.8, 0.0, lease=n) for n in range(5)], together, decay=0.9)
    for n in range(5):
        rae([game(0.8, 0.0, lease=n)], apart, decay=0.9)
    assert together == pytest.approx(apart, rel=1e-12)


def test_the_baseline_comes_to_the_mean_and_then_advantages_to_the_rewards_less_it():
    draw, baselines = np.random.default_rng(0), {}
    for n in range(300):
        rae([game(*draw.normal((0.8, -0.8), 0.1).tolist(), lease=n)], baselines, decay=0.95)
    assert baselines["default/white"] == pytest.approx(0.8, abs=0.05)
    assert baselines["default/black"] == pytest.approx(-0.8, abs=0.05)


def test_a_games_name_has_baselines_of_its_own():
    chess, go = game(1.0, 0.0, metadata={"game": "chess"}), game(0.0, 0.0, 1, metadata={"game": "go"})
    baselines: dict[str, float] = {}
    rae([chess, go], baselines, metadata_key="game")
    assert baselines["default/white/chess"] == 0.5
    assert baselines["default/white/go"] == 0.0
    with pytest.raises(ConfigError, match=r"metadata_key=game, and .*g00000000\.0 has \['turns'\]"):
        rae([game(0.0, 0.0)], {}, metadata_key="game")


def test_names_with_slashes_are_not_taken_for_others():
    made = group(1.0, 0.0)
    one = replace(made[0], agent="a", rollout=0, metadata={"game": "b/c"})
    other = replace(made[1], agent="a/b", rollout=0, metadata={"game": "c"})
    baselines: dict[str, float] = {}
    assert rae([[one, other]], baselines, metadata_key="game") == [[1.0, 0.0]]
    assert baselines == {"default/a/b%2Fc": 0.5, "default/a%2Fb/c": 0.0}


def test_what_is_not_trained_moves_no_baseline():
    baselines: dict[str, float] = {}
    broken = [replace(t, end="timeout") for t in game(9.0, 9.0)]
    assert rae([broken], baselines) == [[0.0, 0.0]]
    assert baselines == {}


def test_forks_of_a_rollout_are_one_episode():
    made = [replace(t, rollout=rollout) for t, rollout in zip(group(4.0, 2.0, 1.0), (0, 0, 1), strict=True)]
    baselines: dict[str, float] = {}
    rae([made], baselines)  # two episodes of mean 2
    assert baselines == {"default/solver": 0.75 * 2.0}


def test_ranks_agree_on_the_bits_also_of_roles_that_only_one_of_them_saw():
    draw = np.random.default_rng(4)
    games = [game(*draw.normal(size=2).tolist(), lease=n) for n in range(7)]
    games[6] = [replace(t, agent="referee") for t in games[6]]
    alone: dict[str, float] = {"default/white": 0.1}
    expected = rae(games, alone)
    kept = [{"default/white": 0.1} for _ in range(3)]
    shares = [games[:2], [], games[2:]]

    def work(own, sums):
        number = next(n for n, share in enumerate(shares) if share is own)
        return rae(own, kept[number], sums=sums)

    found = [each for share in Ranks(shares).run(work) for each in share]
    assert found == expected
    assert kept == [alone] * 3


def test_baselines_survive_a_checkpoint_bit_for_bit():
    progress = Progress(baselines={"default/white": 0.1 + 0.2, "b": -1e-300})
    again = Progress.from_json(json.loads(json.dumps(progress.to_json())))
    assert again.baselines == progress.baselines
    older = {name: value for name, value in progress.to_json().items() if name != "baselines"}
    assert Progress.from_json(older).baselines == {}
