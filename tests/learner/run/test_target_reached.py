"""When a run's held-out accuracy was the first to reach its target."""

from learner.progress.progress import Progress


def test_the_first_evaluation_that_reaches_the_target_says_when():
    progress = Progress(stage="rl", step=4)
    progress.rl_s = 10.0
    progress.note_evaluation(4, 0.5, 0.6, target=0.75)
    assert progress.target_reached_step is None
    progress.step, progress.rl_s = 6, 20.0
    progress.note_evaluation(6, 0.75, 0.6, target=0.75)
    progress.step, progress.rl_s = 8, 30.0
    progress.note_evaluation(8, 0.9, 0.9, target=0.75)
    assert (progress.target_reached_step, progress.target_reached_s) == (6, 20.0)
    assert progress.evaluations == {"4": (0.5, 0.6), "6": (0.75, 0.6), "8": (0.9, 0.9)}
    assert progress.sampled_accuracy(6) == 0.75


def test_an_evaluation_before_reinforcement_learning_or_without_a_target_reaches_none():
    progress = Progress(stage="warmup")
    progress.note_evaluation(0, 1.0, 1.0, target=0.5)
    progress.stage = "rl"
    progress.note_evaluation(1, 1.0, 1.0, target=None)
    assert progress.target_reached_step is None


def test_evaluations_that_a_checkpoint_has_taken_do_not_change():
    progress = Progress(stage="rl")
    taken = progress.evaluations
    progress.note_evaluation(1, 0.5, 0.5, target=None)
    assert taken == {}
