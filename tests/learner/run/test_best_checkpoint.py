"""Which checkpoint is best, and which are kept for it, over results that come late and learners that die."""

from bus.evaluation_messages import EvaluationResult
from learner.progress.progress import Best, Progress, kept_steps
from learner.run.checkpointing import BestCheckpoint


def result(version: int, sampled: float = 0.0, data_set: str = "", **scores: float) -> EvaluationResult:
    return EvaluationResult(
        policy_version=version, incarnation="one", sampled=sampled, greedy=1.0, prompts=2, seconds=1.0,
        oldest_version=version, newest_version=version,
        data_set=data_set, scores={name.replace("_at_", "@"): value for name, value in scores.items()},
    )  # fmt: skip


def training(step: int, *, trains_from: int = 1, **changes: object) -> Progress:
    return Progress(
        stage="rl", step=step, policy_version=trains_from + step, trains_from=trains_from, **changes
    )


def test_the_best_by_its_score_is_kept_and_those_whose_results_are_awaited():
    progress = training(2)
    best = BestCheckpoint("aime/pass@4", progress, warms_up=True)
    for version in (3, 5, 7):
        best.asked(version)
    assert progress.kept == {2, 4, 6}
    best.on_result(result(5, data_set="aime", pass_at_4=0.5))
    assert progress.best == Best("aime/pass@4", 0.5, policy_version=5, step=4)
    best.on_result(result(3, data_set="aime", pass_at_4=0.25))
    best.on_result(result(7, data_set="aime", pass_at_4=0.5))  # no better
    assert progress.best.step == 4
    assert progress.kept == {4}
    assert [best.keeps(step) for step in (2, 4, 6)] == [False, True, False]


def test_other_data_sets_and_versions_without_a_checkpoint_do_not_count():
    progress = training(2)
    best = BestCheckpoint("heldout/sampled", progress, warms_up=True)
    best.asked(3)
    best.on_result(result(3, 0.9, data_set="aime"))
    best.on_result(result(2, 0.9))
    assert (progress.best, progress.kept) == (None, {2})
    best.on_result(result(3, 0.1))
    assert progress.best == Best("heldout/sampled", 0.1, policy_version=3, step=2)


def test_a_version_before_reinforcement_learning_has_no_checkpoint():
    progress = Progress()
    best = BestCheckpoint("heldout/greedy", progress, warms_up=True)
    best.asked(0)
    best.on_result(result(0))
    assert (progress.best, progress.kept) == (None, set())
    without = Progress()
    best = BestCheckpoint("heldout/greedy", without, warms_up=False)
    best.asked(0)
    best.on_result(result(0))
    assert without.best == Best("heldout/greedy", 1.0, policy_version=0, step=0)


def test_it_goes_on_from_a_checkpoint_and_asks_again_for_the_result_that_a_dead_learner_awaited():
    progress = training(4)
    best = BestCheckpoint("heldout/sampled", progress, warms_up=True)
    for version, sampled in ((3, 0.5), (5, None)):
        best.asked(version)
        if sampled is not None:
            best.on_result(result(version, sampled))
    saved = progress.to_json()
    assert kept_steps(saved) == {2, 4}
    resumed = Progress.from_json(saved)
    best = BestCheckpoint("heldout/sampled", resumed, warms_up=True)
    assert best.asks_again
    assert resumed.best == Best("heldout/sampled", 0.5, policy_version=3, step=2)
    assert resumed.kept == {2}
    best.asked(5)
    best.on_result(result(5, 0.75))
    assert resumed.best.step == 4
    assert not BestCheckpoint(
        "heldout/sampled", Progress.from_json(saved | {"step": 5}), warms_up=True
    ).asks_again


def test_another_score_begins_anew_and_none_keeps_nothing():
    best = Best("heldout/sampled", 0.5, policy_version=3, step=2)
    for metric in ("heldout/greedy", None):
        progress = training(4, best=best, awaited=[4])
        following = BestCheckpoint(metric, progress, warms_up=True)
        assert (progress.best, progress.kept) == (None, set())
        assert following.asks_again == (metric is not None)
        following.asked(5)
        assert progress.kept == ({4} if metric else set())


def test_a_checkpoint_of_an_older_build_has_no_best():
    saved = {name: value for name, value in Progress().to_json().items() if name not in ("best", "awaited")}
    assert kept_steps(saved) == set()
    assert Progress.from_json(saved).best is None
