"""Steps of a real run trained again from its lineage, checkpoints and replay shards."""

import asyncio
import shutil
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bus.errors import ConfigError, StorageError
from bus.messages import parse_trajectory_name
from bus.topology import shard_of
from bus.trajectory import Trajectory
from learner.backends.megatron.trainer import Trainer
from learner.checkpoint.commit import read_extra
from learner.config.advantage import GDPOAdvantage
from learner.config.loss import PPOClipLoss
from learner.history import retrain
from learner.history.retrain import last_step, retrain_steps, summary
from learner.initial.initial import prepare
from learner.metrics import trained_facts, trained_logprobs
from storage.client.reader import ReplayReader
from storage.disk import checkpoints
from storage.store.replay import ReplayStore
from tests.learner.mini_run import LEARNER, TRAINS_FROM, MiniRun, in_one_process, mini_run, past_run
from tests.storage.serving import SHARDS

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.usefixtures("in_process")]


RESUMED: list[int] = []
"""Steps that the learners of `past` told storage they go on from."""


def retrained(run: MiniRun, from_step: int, to_step: int, **options):
    settings = run.settings()
    with ExitStack() as stack:
        stores = [
            stack.enter_context(closing(ReplayStore.open(run.directory / str(n), writable=False)))
            for n in range(SHARDS)
        ]
        initial = prepare(settings, run.demonstrations)
        return list(retrain_steps(settings, initial, stores, from_step=from_step, to_step=to_step, **options))


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> MiniRun:
    """Six steps; the learner was killed after the third, and had a checkpoint of the second."""
    with pytest.MonkeyPatch.context() as patch:
        in_one_process(patch)
        resumed = ReplayReader.resumed

        async def noted(reader: ReplayReader, step: int) -> None:
            RESUMED.append(step)
            await resumed(reader, step)

        patch.setattr(ReplayReader, "resumed", noted)
        return asyncio.run(past_run(tmp_path_factory.mktemp("past"), steps=6, killed_after=3))


def test_storage_is_told_the_step_that_a_learner_resumes_from(past: MiniRun):
    assert RESUMED == [0, 2, 6]  # at the start, after the kill, and at the end


def test_a_step_is_trained_again_at_the_version_that_trained_it(past: MiniRun, monkeypatch):
    train_on, versions = retrain.train_on, []

    def noted(*arguments, policy_version: int, **named):
        versions.append(policy_version)
        return train_on(*arguments, policy_version=policy_version, **named)

    monkeypatch.setattr(retrain, "train_on", noted)
    retrained(past, 5, 6)
    of_tokens = {
        int(v)
        for lease in past.steps()[6].leases
        for t in rollouts_of(past, lease)
        for v in t.policy_versions[t.loss_mask]
    }  # no group may be stale here
    assert {versions[-1]} == of_tokens


def test_a_run_that_was_killed_and_resumed_is_trained_again_in_one_go_bit_for_bit(past: MiniRun):
    assert len((past.directory / "lineage.jsonl").read_text().splitlines()) > 6  # step 3 was trained twice
    again = retrained(past, 0, 6)
    report = summary(again)
    assert (report["batches"], report["batches_equal"]) == (6, 6)
    assert report["loss_max_abs_diff"] == report["grad_norm_max_abs_diff"] == 0.0
    assert report["first_step_that_differs"] is None
    assert [step.loss for step in again] == [past.steps()[n].loss for n in range(1, 7)]
    assert len({step.loss for step in again}) == 6


def test_each_step_is_recorded_with_the_version_that_it_made(past: MiniRun):
    """No group may be stale here, so that its tokens say of which weights their step is."""
    for step, line in past.steps().items():
        assert line.policy_version == TRAINS_FROM + step
        sampled = [rollouts_of(past, lease) for lease in line.leases]
        versions = {int(v) for group in sampled for t in group for v in t.policy_versions[t.loss_mask]}
        assert versions == {line.policy_version - 1}


def rollouts_of(run: MiniRun, lease: int) -> list[Trajectory]:
    shard = run.directory / str(shard_of(lease, SHARDS))
    with closing(ReplayStore.open(shard, writable=False)) as store:
        return store.read([lease])


def test_log_probs_of_a_few_trajectories_of_the_first_step_are_recorded(past: MiniRun):
    recorded = trained_logprobs.trajectories(past.directory)
    assert len(recorded) == 4
    assert {parse_trajectory_name(name)[0] for name in recorded} <= set(past.steps()[1].leases)
    found = trained_logprobs.read(past.directory, [1])[min(recorded)]
    assert (found.step, found.policy_version) == (1, past.steps()[1].policy_version - 1)


def test_the_advantage_of_every_trajectory_of_every_step_is_recorded(past: MiniRun):
    leases = {lease: [step] for step, line in past.steps().items() for lease in line.leases}
    recorded = trained_facts.read(past.directory, leases)
    for lease, [step] in leases.items():
        rewards = np.array([t.reward for t in rollouts_of(past, lease)])
        by_hand = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        found = [facts.advantage for facts in recorded[lease][step].values()]
        assert found == pytest.approx(by_hand.tolist(), rel=1e-5), lease


def test_the_importance_ratios_of_every_trajectory_are_those_of_the_log_probs_that_are_recorded(
    past: MiniRun,
):
    """The log-probs of the first step are of a pass of their own; the cap is that of token TIS."""
    leases = {lease: [step] for step, line in past.steps().items() for lease in line.leases}
    facts = trained_facts.read(past.directory, leases)
    known = [one.ratios for steps in facts.values() for found in steps.values() for one in found.values()]
    assert len(known) == sum(len(rollouts_of(past, lease)) for lease in leases)
    assert all(ratios is not None and ratios.least <= ratios.mean <= ratios.largest for ratios in known)
    recorded = trained_logprobs.read(past.directory, [1])
    for name, logprobs in recorded.items():
        lease, sample = parse_trajectory_name(name)
        t = rollouts_of(past, lease)[sample]
        by_hand = np.exp(logprobs.logprobs.astype(np.float64) - t.behaviour_logprobs[t.loss_mask])
        expected = by_hand.mean(), by_hand.min(), by_hand.max(), (by_hand > 2).mean()
        assert facts[lease][1][sample].ratios == pytest.approx(expected, rel=1e-5), name


def test_from_a_checkpoint_the_steps_before_the_first_are_trained_silently(past: MiniRun):
    again = retrained(past, 5, 6)
    assert [(step.step, step.differs) for step in again] == [(6, False)]
    assert last_step(past.settings()) == 6


def test_checkpoints_hold_the_groups_of_the_steps_since_the_one_before(past: MiniRun):
    extras = [read_extra(checkpoints.directory(past.directory / "checkpoints", n)) for n in (4, 6)]
    leases = {str(n): list(step.leases) for n, step in past.steps().items()}
    assert [extra["groups"] for extra in extras] == [
        {n: leases[n] for n in ("3", "4")},
        {n: leases[n] for n in ("5", "6")},
    ]


def test_steps_that_cannot_be_trained_again_are_refused_with_what_is_there(past: MiniRun):
    with pytest.raises(ConfigError, match=r"no checkpoint up to step 3 .* of steps \[4, 6\]"):
        retrained(past, 3, 4)
    with pytest.raises(ConfigError, match="lacks step 7: it holds steps 1 to 6"):
        retrained(past, 4, 7)


def test_another_objective_trains_on_the_same_groups_from_the_runs_own_weights(past: MiniRun):
    other = LEARNER.model_copy(update={"loss": PPOClipLoss(clip_eps=0.01)})
    changed = retrained(past, 5, 6, changed=other)
    assert [step.batch_equal for step in changed] == [True]
    assert changed[0].loss_diff > 0
    rewarded = retrained(past, 5, 6, reward=lambda trajectory: float(trajectory.sample))
    assert [step.batch_equal for step in rewarded] == [False]
    assert summary(rewarded)["first_step_that_differs"] == 6
    assert rewarded[0].reward_mean == 1.0


def test_other_rewards_that_the_advantage_would_not_look_at_are_refused(past: MiniRun):
    parts = LEARNER.model_copy(update={"advantage": GDPOAdvantage(rewards={"right": 1.0})})
    with pytest.raises(ConfigError, match=r"other rewards have no effect with .*gdpo"):
        retrained(past, 5, 6, changed=parts, reward=lambda trajectory: float(trajectory.sample))


def test_a_batch_that_is_another_than_then_is_noticed(past: MiniRun, tmp_path: Path):
    shutil.copytree(past.directory, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "lineage.jsonl"
    first, others = path.read_text().split("\n", 1)
    path.write_text(first.replace('"weights":[1.0,1.0]', '"weights":[1.0,0.5]') + "\n" + others)
    again = retrained(replace(past, directory=tmp_path), 0, 2)
    assert [step.batch_equal for step in again] == [False, True]
    assert again[1].differs  # other weights compute other losses on equal batches


async def test_groups_that_were_retired_are_missed_with_the_way_to_bring_them_back(bus, tmp_path):
    async with mini_run(bus, tmp_path) as run:
        await run.train(steps=2)
        for store in run.storage.stores:
            for entry in store.entries:
                store.retire(entry, None)
        with pytest.raises(StorageError, match=r"step 1 cannot be trained again: .*retired.*launch restore"):
            await asyncio.to_thread(retrained, run, 0, 2)


async def test_a_resumed_learner_trains_with_its_own_number_of_threads(bus, tmp_path, monkeypatch):
    """Other threads would add up in another order."""
    threads, train_step = [], Trainer.train_step
    monkeypatch.setattr(
        Trainer,
        "train_step",
        lambda *a, **k: (threads.append(torch.get_num_threads()), train_step(*a, **k))[1],
    )
    async with mini_run(bus, tmp_path) as run:
        await run.train(steps=2)
        torch.set_num_threads(2)
        try:
            await run.train(steps=4)
        finally:
            torch.set_num_threads(1)
    assert threads == [1] * (2 + 4)


@pytest.mark.parametrize("side", ["lineage", "ledger"])
async def test_a_checkpoint_of_another_history_is_refused_before_storage_hears_of_it(bus, tmp_path, side):
    async with mini_run(bus, tmp_path) as run:
        await run.train(steps=2)
        ledger = run.storage.ledger
        if side == "lineage":
            path = tmp_path / "lineage.jsonl"
            path.write_text(path.read_text().replace('"leases":[2,3]', '"leases":[2,9]'))
        else:
            ledger.roll_back(1)
        incarnation = ledger.facts["incarnation"]
        said = {"lineage": r"\[2, 3\], but .*jsonl says \[2, 9\]", "ledger": "storage gave it none"}[side]
        with pytest.raises(ExceptionGroup) as refused:
            await run.train(steps=3)
        assert refused.group_contains(StorageError, match=f"trained step 2 on groups .*{said}")
        assert ledger.facts["incarnation"] == incarnation
