"""Score tables, and how new rewards compare with old ones."""

import pytest

from bus.errors import ConfigError
from storage.client.score_tables import Class, Score, compare, load_scores, save_scores, scores_path


def scores(*pairs: tuple[float, float]) -> list[Score]:
    return [Score(f"g{n:08d}.0", old, new) for n, (old, new) in enumerate(pairs)]


def test_table_comes_back_by_lease_and_sample(tmp_path):
    path = scores_path(tmp_path, "strict")
    save_scores(path, [Score("g00000012.3", 0.5, 0.1 + 0.2), Score("g00000012.0", 0.5, -1.0)])
    assert load_scores(path) == {(12, 3): 0.1 + 0.2, (12, 0): -1.0}
    save_scores(path, scores((0, 1)))
    assert load_scores(path) == {(0, 0): 1.0}


def test_missing_table_names_those_there_are(tmp_path):
    save_scores(scores_path(tmp_path, "strict"), scores((0, 1)))
    with pytest.raises(ConfigError, match=r"there are strict; `launch rescore` makes one"):
        load_scores(scores_path(tmp_path, "lenient"))


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"trajectory_id": "g00000001.0"}', '{"trajectory_id": "1", "reward": 1}']
)
def test_line_that_is_no_score_is_named(tmp_path, line):
    (tmp_path / "t.jsonl").write_text('{"trajectory_id": "g00000000.0", "reward": 1}\n' + line)
    with pytest.raises(ConfigError, match=r"t\.jsonl, line 2: not a score"):
        load_scores(tmp_path / "t.jsonl")


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden"])
def test_table_name_that_is_no_file_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot name a score table"):
        scores_path(tmp_path, name)


def test_comparison_of_hand_worked_rewards():
    found = compare(scores((0, 0), (0, 1), (1, 2), (1, 2)))
    assert (found.mean_old, found.mean_new, found.changed_fraction) == (0.5, 1.25, 0.75)
    # ranks 1.5, 1.5, 3.5, 3.5 and 1, 2, 3.5, 3.5: covariance 4, variances 4 and 4.5
    assert found.rank_correlation == pytest.approx(4 / (4 * 4.5) ** 0.5)
    assert found.by_old == (Class("0", 2, 0.5), Class("1", 2, 2.0))


def test_correlation_with_equal_rewards_is_not_defined():
    assert compare(scores((1, 0), (1, 1))).rank_correlation is None
    assert compare(scores((1, 1))).rank_correlation is None


def test_many_values_are_compared_by_quarters():
    found = compare(scores(*((n, -n) for n in range(100))))
    assert found.rank_correlation == pytest.approx(-1)
    assert [row.trajectories for row in found.by_old] == [25, 25, 25, 25]
    assert [row.mean_new for row in found.by_old] == [-12, -37, -62, -87]
