from learner.lineage import read, record


def test_of_a_step_trained_again_the_last_time_counts(tmp_path):
    path = tmp_path / "lineage.jsonl"
    for step, incarnation, leases in ((1, "a", [0, 1]), (2, "a", [2, 3]), (3, "a", [4]), (2, "b", [3, 5])):
        record(path, step=step, policy_version=step, incarnation=incarnation, lease_ids=leases)
    with path.open("a") as file:
        file.write('{"step":3,"leases"')  # killed while it wrote
    assert read(path, until_step=2) == {1: [0, 1], 2: [3, 5]}


def test_a_run_that_trained_nothing_has_no_lineage(tmp_path):
    assert read(tmp_path / "lineage.jsonl", until_step=9) == {}
