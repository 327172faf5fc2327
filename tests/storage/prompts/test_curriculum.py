"""Success by source and the shares that follow from it."""

import json
from contextlib import closing

import pytest

from storage.ledger.ledger import Ledger
from storage.prompts.curriculum import SourceSuccess, Success, preference, weights
from storage.prompts.data_sets import DataSets
from storage.prompts.sources import load_sources
from storage.settings.data import (
    BandCurriculum,
    DataConfig,
    LearnabilityCurriculum,
    NoCurriculum,
    SourceConfig,
)


def test_learnability_is_the_variance_of_a_reward_of_nought_or_one_over_its_largest():
    wanted = {0.0: 0.0, 0.1: 0.36, 0.25: 0.75, 0.5: 1.0, 0.9: 0.36, 1.0: 0.0}
    assert {p: pytest.approx(preference(LearnabilityCurriculum(), p), abs=1e-15) for p in wanted} == wanted


def test_a_band_prefers_what_lies_within_and_falls_to_both_ends():
    band = BandCurriculum(low=0.2, high=0.6)
    wanted = {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.4: 1.0, 0.6: 1.0, 0.8: 0.5, 1.0: 0.0}
    assert {p: pytest.approx(preference(band, p), abs=1e-15) for p in wanted} == wanted
    assert preference(BandCurriculum(low=0.0), 0.0) == preference(BandCurriculum(high=1.0), 1.0) == 1.0
    with pytest.raises(ValueError, match=r"low=0.9 is above high=0.8"):
        BandCurriculum(low=0.9)


def test_weights_worked_by_hand():
    """Shares 3/4 and 1/4, preferences 0.36 and 1: 0.27 and 0.25 of 0.52; a tenth stays as configured."""
    found = weights(LearnabilityCurriculum(floor=0.1), {"a": 3.0, "b": 1.0}, {"a": 0.9, "b": 0.5})
    assert found["a"] == pytest.approx(0.1 * 0.75 + 0.9 * 0.27 / 0.52, abs=1e-15)
    assert found["b"] == pytest.approx(0.1 * 0.25 + 0.9 * 0.25 / 0.52, abs=1e-15)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-15)


def test_no_source_falls_below_its_floor_and_all_keep_their_shares_if_none_teaches():
    curriculum = LearnabilityCurriculum(floor=0.2)
    found = weights(curriculum, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 0.5})
    assert found == {"a": pytest.approx(0.1), "b": pytest.approx(0.9)}
    assert weights(curriculum, {"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 0.0}) == {"a": 0.75, "b": 0.25}


def test_success_is_averaged_with_falling_weights():
    """Groups that solve 1, 0 and 1/2, with half the weight each: (1/4 + 0 + 1/2) / (1/4 + 1/2 + 1)."""
    found = Success()
    assert (found.solved, found.figures) == (0.5, {})
    for rewards in ([1.0, 1.0], [0.0, 0.5], [2.0, 0.0]):
        found = found.after(rewards, solved_at=1.0, memory_groups=2)
    assert (found.groups, found.weight) == (3, 1.75)
    assert found.figures == {
        "reward": pytest.approx((1 / 4 + 0.25 / 2 + 1) / 1.75),
        "solved": pytest.approx(0.75 / 1.75),
    }
    assert found.solved == pytest.approx((0.75 + 0.5) / 2.75)  # and one group of 1/2 before the first


def mixed(tmp_path, curriculum):
    """A ledger, its data sets of two sources, and their success."""
    for name in "ab":
        lines = (json.dumps({"prompt": f"{name}{n}"}) for n in range(20))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    config = DataConfig(sources=[SourceConfig(name=n, prompts=tmp_path / f"{n}.jsonl") for n in "ab"])
    prompts, sources = load_sources(config.sources, config.keys, tmp_path)
    ledger = Ledger.open(tmp_path / "ledger.db")
    sets = DataSets(ledger, tmp_path)
    sets.configure(prompts, seed=0, shuffle=True, source="both", sources=sources)
    return ledger, sets, SourceSuccess(ledger, sets, curriculum, solved_at=1.0)


def test_shares_move_to_what_is_solved_half_of_the_time_and_a_restart_goes_on(tmp_path):
    curriculum = LearnabilityCurriculum(every_groups=20, memory_groups=1e6, floor=0.1)
    ledger, sets, success = mixed(tmp_path, curriculum)
    with closing(ledger):
        leases = ledger.issue(30, policy_version=0)
        for lease in leases[:19]:
            success.note(lease, [1.0, 1.0] if sets.source(lease) == "a" else [1.0, 0.0])
            assert not success.mix_if_due()
    ledger, sets, success = mixed(tmp_path, curriculum)
    with closing(ledger):
        success.note(leases[19], [1.0, 1.0] if sets.source(leases[19]) == "a" else [1.0, 0.0])
        assert success.mix_if_due()
        assert not success.mix_if_due()
        # of 10 groups each: a solves 10.5 of 11, b 5.5 of 11
        of_a, of_b = 4 * 21 / 22 / 22, 1.0
        a = 0.05 + 0.9 * of_a / (of_a + of_b)
        assert [one.share for one in sets.latest.sources] == [round(1000 * a), 1000 - round(1000 * a)]
        figures = success.figures
        assert figures["a"] == {
            "share": round(1000 * a) / 1000, "drawn": 15, "groups": 10,
            "reward": pytest.approx(1.0), "solved": pytest.approx(1.0),
        }  # fmt: skip
        assert figures["b"]["solved"] == pytest.approx(0.5)
    ledger, sets, success = mixed(tmp_path, curriculum)
    with closing(ledger):
        assert success.figures == figures


def test_a_group_without_known_rewards_says_nothing(tmp_path):
    ledger, _, success = mixed(tmp_path, LearnabilityCurriculum(every_groups=1))
    with closing(ledger):
        [lease] = ledger.issue(1, policy_version=0)
        success.note(lease, [])
        assert not success.mix_if_due()


def test_without_a_curriculum_shares_stay(tmp_path):
    ledger, sets, success = mixed(tmp_path, NoCurriculum())
    with closing(ledger):
        for lease in ledger.issue(300, policy_version=0):
            success.note(lease, [0.0, 0.0])
        assert not success.mix_if_due()
        assert [one.share for one in sets.latest.sources] == [500, 500]
