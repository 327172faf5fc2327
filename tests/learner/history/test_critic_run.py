"""A run with a critic, whose learner is killed: it resumes, is trained again, and is followed by a shadow."""

import asyncio
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from bus.connection import Bus
from bus.errors import ConfigError
from learner.config.advantage import GAEAdvantage, GRPOAdvantage
from learner.config.critic import CriticConfig, CriticOptimizerConfig
from learner.config.publication import PublicationConfig
from learner.history.retrain import retrain_steps, summary
from learner.history.witness import witness
from learner.initial.initial import prepare
from learner.publication.publisher import WeightPublisher
from storage.store.replay import ReplayStore
from tests.learner.mini_run import MiniRun, in_one_process, mini_run, past_run
from tests.storage.serving import SHARDS

pytestmark = [pytest.mark.slow, pytest.mark.nats]
CHANGES = {
    "advantage": GAEAdvantage(),
    "critic": CriticConfig(
        warmup_steps=2, epochs=2, targets="vtrace", optimizer=CriticOptimizerConfig(lr=3e-3)
    ),
}


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> MiniRun:
    """Six steps, two of them with the critic alone; the learner was killed after the third."""
    with pytest.MonkeyPatch.context() as patch:
        in_one_process(patch)
        directory = tmp_path_factory.mktemp("past")
        return asyncio.run(past_run(directory, steps=6, killed_after=3, **CHANGES))


def with_stores(run: MiniRun, use, **changes):
    settings = run.settings(**changes)
    with ExitStack() as stack:
        stores = [
            stack.enter_context(closing(ReplayStore.open(run.directory / str(n), writable=False)))
            for n in range(SHARDS)
        ]
        return use(settings, prepare(settings, run.demonstrations), stores)


@pytest.mark.parametrize("from_step", [0, 4])
def test_steps_are_trained_again_bit_for_bit_from_the_beginning_and_from_a_checkpoint(past, from_step):
    again = with_stores(
        past, lambda *them: list(retrain_steps(*them, from_step=from_step, to_step=6)), **CHANGES
    )
    report = summary(again)
    assert (report["batches_equal"], report["first_step_that_differs"]) == (6 - from_step, None)
    losses = [past.steps()[step].loss for step in range(1, 7)]
    assert losses[:2] == [0.0, 0.0]  # the critic alone
    assert len(set(losses[2:])) == 4


def test_the_weights_say_how_often_a_group_was_trained_on(past: MiniRun):
    lease = past.steps()[5].leases[0]
    assert with_stores(past, lambda *them: witness(*them, lease), **CHANGES).trained == "once"


def test_another_objective_is_tried_with_and_without_the_critic(past: MiniRun):
    settings = past.settings(**CHANGES)
    for change in (
        {"advantage": GRPOAdvantage(), "critic": CriticConfig()},
        {"critic": settings.learner.critic.model_copy(update={"level": "turn"})},
    ):
        changed = settings.learner.model_copy(update=change)
        again = with_stores(
            past,
            lambda *them, changed=changed: list(
                retrain_steps(*them, from_step=4, to_step=6, changed=changed)
            ),
            **CHANGES,
        )
        assert [step.batch_equal for step in again] == [False, False]
        assert all(step.loss_diff > 0 for step in again)


def test_a_critic_of_a_run_that_had_none_is_refused_by_name(past: MiniRun):
    changed = past.settings(**CHANGES).learner
    with pytest.raises(
        ConfigError, match=r"learner\.advantage\.type=gae needs the critic of a run that had one"
    ):
        with_stores(past, lambda *them: list(retrain_steps(*them, from_step=0, to_step=6, changed=changed)))


@pytest.mark.usefixtures("in_process")
async def test_a_shadow_with_a_critic_follows_a_learner_without_one(bus: Bus, tmp_path):
    async with mini_run(bus, tmp_path) as run:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            shadow = tasks.create_task(run.follow(stop, **CHANGES))
            progress = await run.train(steps=4)
            assert progress.step == 4
            followed = await shadow
    assert (followed.step, followed.steps_retired) == (4, 0)
    ours, theirs = run.shadow_steps(), run.steps()
    assert [step.leases for step in ours.values()] == [step.leases for step in theirs.values()]
    assert ours[4].loss != theirs[4].loss


@pytest.mark.usefixtures("in_process")
async def test_a_version_that_is_not_trained_raises_no_alarm(bus: Bus, tmp_path, monkeypatch):
    alarms: list[tuple[int, str]] = []
    note = WeightPublisher._note_unchanged

    def noted(publisher: WeightPublisher, policy_version: int, *, unchanged: bool) -> None:
        note(publisher, policy_version, unchanged=unchanged)
        alarms.append((policy_version, publisher.alarm))

    monkeypatch.setattr(WeightPublisher, "_note_unchanged", noted)
    async with mini_run(bus, tmp_path) as run:
        await run.train(steps=3, publication=PublicationConfig(snapshot_every=50), **CHANGES)
        changed = replace(run.settings(**CHANGES))
    assert changed.learner.only_critic_trains(2)
    assert {2, 3, 4} <= {version for version, _ in alarms}  # versions of steps 1 to 3
    assert not any(alarm for _, alarm in alarms)
