"""Faults that the tests must catch: each replaces one text in one file of the product."""

from typing import NamedTuple

STEPS = ("tests/storage/dispatch", "tests/storage/ledger", "tests/storage/client")
LEARNER = (
    "tests/learner/progress/test_lineage.py",
    "tests/learner/run/test_checkpointing.py",
    "tests/learner/history",
    "tests/learner/run/test_conclusion.py",
)
ACTORS = (
    "tests/actors/rollouts/test_redelivery.py",
    "tests/actors/rollouts/test_worker.py",
    "tests/actors/rollouts/test_worker_stop.py",
    "tests/actors/rollouts/test_lease_admission.py",
)


class Mutation(NamedTuple):
    """Names a fault and the tests that are to catch it."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "groups one step past the bound are trained",
        "storage/ledger/sampling.py",
        "c.policy_version + max_staleness < train_version)",
        "c.policy_version + max_staleness + 1 < train_version)",
        ("tests/storage/ledger/test_sampling.py",),
    ),
    Mutation(
        "groups expire a step too early",
        "storage/ledger/sampling.py",
        "c.policy_version + max_staleness < train_version)",
        "c.policy_version + max_staleness <= train_version)",
        ("tests/storage/ledger/test_sampling.py",),
    ),
    Mutation(
        "a step too many is issued ahead",
        "storage/ledger/sampling.py",
        "((max_staleness + 1) * groups - owed)",
        "((max_staleness + 2) * groups - owed)",
        ("tests/storage/dispatch/test_admission.py", "tests/storage/ledger/test_sampling.py"),
    ),
    Mutation(
        "the loss mask is not shifted",
        "learner/data/packing.py",
        "loss_mask = np.concatenate(_shifted([sample.loss_mask for sample in samples]))",
        "loss_mask = np.concatenate([sample.loss_mask for sample in samples])",
        ("tests/learner/data/test_packing.py",),
    ),
    Mutation(
        "importance weights are cut off from below",
        "learner/algorithms/corrections.py",
        "return ratio.clamp(max=cap), kept",
        "return ratio.clamp(min=cap), kept",
        ("tests/learner/algorithms/test_bounds.py",),
    ),
    Mutation(
        "batches are not acked",
        "bus/streams/consume.py",
        (
            "                for received in await _handled(batch, bus, handle):\n"
            "                    await received.ack()"
        ),
        "                await _handled(batch, bus, handle)",
        ("tests/bus/streams/test_consume.py",),
    ),
    Mutation(
        "batches are acked before they are handled",
        "bus/streams/consume.py",
        (
            "                for received in await _handled(batch, bus, handle):\n"
            "                    await received.ack()"
        ),
        (
            "                for received in batch:\n"
            "                    await received.ack()\n"
            "                await _handled(batch, bus, handle)"
        ),
        ("tests/bus/streams/test_consume.py",),
    ),
    Mutation(
        "a draw does not depend on the step",
        "storage/ledger/sampling.py",
        "np.random.PCG64([seed, step])",
        "np.random.PCG64([seed, 0])",
        ("tests/storage/ledger/test_strategies.py",),
    ),
    Mutation(
        "every epoch has the same order",
        "storage/prompts/order.py",
        "np.random.PCG64([self.seed, epoch])",
        "np.random.PCG64([self.seed, 0])",
        ("tests/storage/prompt_files/test_prompts.py",),
    ),
    Mutation(
        "GAE bootstraps from the own state",
        "learner/algorithms/advantages/gae.py",
        ("    surprises = rewards + discount * _next(values) - values\n    return _summed"),
        ("    surprises = rewards + discount * values - values\n    return _summed"),
        ("tests/learner/algorithms/test_traces.py",),
    ),
    Mutation(
        "duplicates are stored",
        "storage/store/replay.py",
        "if stored or fresh.setdefault((t.lease_id, t.sample), t) is not t:",
        "if fresh.setdefault((t.lease_id, t.sample), t) is not t:",
        ("tests/storage/store/test_replay.py",),
    ),
    Mutation(
        "a delta is applied to any base",
        "storage/weights/deltas.py",
        ("if header.base_version != base.policy_version or header.base_digest != base.digest():"),
        "if header.base_version != base.policy_version:",
        ("tests/storage/weights/test_deltas.py",),
    ),
    Mutation(
        "all tokens say the newest version",
        "actors/policy/strand.py",
        "versions[span] = generation.policy_versions",
        "versions[span] = np.max(generation.policy_versions, initial=0)",
        ("tests/actors/policy", "tests/actors/rollouts/test_interruption.py"),
    ),
    Mutation(
        "the upper clip bounds from below too",
        "learner/algorithms/losses/clipped.py",
        "ratio.clamp(1 - clip_eps, 1 + high)",
        "ratio.clamp(1 - high, 1 + high)",
        ("tests/learner/algorithms/test_losses.py", "tests/learner/algorithms/test_further_losses.py"),
    ),
    Mutation(
        "the mean over trajectories counts tokens",
        "learner/algorithms/aggregation.py",
        "return 1.0 / np.maximum(lengths, 1), (lengths > 0).astype(np.float64)",
        "return 1.0 / np.maximum(lengths, 1), lengths.astype(np.float64)",
        ("tests/learner/algorithms/test_aggregation.py",),
    ),
    Mutation(
        "the token at the top-p boundary is cut off",
        "actors/engines/embedded/sampling.py",
        "mass_before = ranked.cumsum(-1, dtype=torch.float64) - ranked",
        "mass_before = ranked.cumsum(-1, dtype=torch.float64)",
        ("tests/actors/engines/embedded",),
    ),
    Mutation(
        "GRPO divides by the sample deviation",
        "learner/algorithms/advantages/group_baselines.py",
        "centred.std() + std_floor",
        "centred.std(ddof=1) + std_floor",
        ("tests/learner/algorithms/test_advantages.py",),
    ),
    Mutation(
        "calls of a rollout share a seed",
        "actors/policy/policy.py",
        'name = f"{self._rollout_id}/{call.number}"',
        'name = f"{self._rollout_id}"',
        ("tests/actors/policy/test_policy.py", "tests/actors/policy/test_rollout_turns.py"),
    ),
    Mutation(
        "quarantined prompts are rolled out",
        "storage/dispatch/admission.py",
        "skipped = {lease_id for lease_id in leases if self._is_quarantined(lease_id)}",
        "skipped: set[int] = set()",
        ("tests/storage/shard/test_quarantine.py", "tests/storage/dispatch/test_admission.py"),
    ),
    Mutation(
        "leases are published before the ledger is flushed",
        "storage/dispatch/dispatcher.py",
        (
            "                    await asyncio.to_thread(self.ledger.flush)\n"
            "                    await self._publication.publish(leases)"
        ),
        "                    await self._publication.publish(leases)",
        ("tests/storage/dispatch/test_dispatcher_restarts.py", "tests/storage/dispatch/test_dispatcher.py"),
    ),
    Mutation(
        "a shard hears of leases that a crash could undo",
        "storage/dispatch/dispatcher.py",
        (
            "        await asyncio.to_thread(self.ledger.flush)  # or a crash could issue the sam"
            "e numbers again\n"
        ),
        "",
        ("tests/storage/dispatch/test_dispatcher_restarts.py", "tests/storage/dispatch/test_dispatcher.py"),
    ),
    Mutation(
        "a checkpoint commits the current step",
        "learner/run/checkpointing.py",
        "await self._committed(step)",
        "await self._committed(self._progress.step)",
        ("tests/learner/run/test_checkpointing.py",),
    ),
    Mutation(
        "a step's version is off by one in the lineage",
        "learner/step/rl_step.py",
        ("        policy_version=policy_version,\n        incarnation"),
        ("        policy_version=policy_version - 1,\n        incarnation"),
        ("tests/learner/history",),
    ),
    Mutation(
        "a commit leaves out its own step",
        "storage/ledger/ledger.py",
        ('uses.lease_id = leases.lease_id AND step <= ?)",\n            (step,),'),
        ('uses.lease_id = leases.lease_id AND step < ?)",\n            (step,),'),
        STEPS,
    ),
    Mutation(
        "a rolled-back use stays in the ledger",
        "storage/ledger/ledger.py",
        ('"AND step <= ?)",\n                ((step, step),)'),
        ('"AND step < ?)",\n                ((step, step),)'),
        STEPS,
    ),
    Mutation(
        "a learner that gives steps back counts as further than it is",
        "storage/dispatch/admission.py",
        "str(min(step, self._committed()) if again else step)",
        "str(max(step, self._committed()) if again else step)",
        STEPS,
    ),
    Mutation(
        "a resumed step is the one that was committed",
        "storage/dispatch/admission.py",
        "str(min(step, self._committed()) if again else step)",
        "str(self._committed())",
        STEPS,
    ),
    Mutation(
        "a fenced learner commits",
        "storage/dispatch/admission.py",
        ("        self.refuse_fenced(incarnation)\n        self._ledger.commit(step)"),
        "        self._ledger.commit(step)",
        STEPS,
    ),
    Mutation(
        "a commit is not flushed",
        "storage/dispatch/dispatcher.py",
        (
            "self._admission.commit(request.step, request.incarnation)\n"
            "        await asyncio.to_thread(self.ledger.flush)"
        ),
        "self._admission.commit(request.step, request.incarnation)",
        STEPS,
    ),
    Mutation(
        "a resume is not flushed",
        "storage/dispatch/dispatcher.py",
        (
            "groups = self._admission.resume(request.step, request.incarnation)\n"
            "        await asyncio.to_thread(self.ledger.flush)"
        ),
        "groups = self._admission.resume(request.step, request.incarnation)",
        STEPS,
    ),
    Mutation(
        "a learner that was replaced is given groups",
        "storage/dispatch/dispatcher.py",
        ("        await self._refuse_usurper(request.incarnation)\n        await self.look_at_policy()"),
        "        await self.look_at_policy()",
        STEPS,
    ),
    Mutation(
        "leases are listed before the ledger is flushed",
        "storage/dispatch/dispatcher.py",
        (
            "        await asyncio.to_thread(self.ledger.flush)  # a lease that was not found sta"
            "ys so across a crash\n"
        ),
        "",
        STEPS,
    ),
    Mutation(
        "published leases are remembered by their lowest number",
        "storage/dispatch/leases.py",
        "str(max(self.through, *lease_ids))",
        "str(min(lease_ids))",
        STEPS,
    ),
    Mutation(
        "a lost lease is published under its old message id",
        "storage/dispatch/leases.py",
        "attempt = secrets.token_hex(4)",
        "attempt = ''",
        STEPS,
    ),
    Mutation(
        "a published lease is not flushed",
        "storage/dispatch/leases.py",
        "        await asyncio.to_thread(self._ledger.flush)  # the bus recognises",
        "        # the bus recognises",
        STEPS,
    ),
    Mutation(
        "an attempt too many is counted",
        "storage/dispatch/lease_status.py",
        "max(0, self._attempts_of(request.lease_id) - 1)",
        "self._attempts_of(request.lease_id)",
        STEPS + ACTORS,
    ),
    Mutation(
        "an attempt is not flushed",
        "storage/dispatch/lease_status.py",
        "        await asyncio.to_thread(self._ledger.flush)  # before the attempt",
        "        # before the attempt",
        STEPS + ACTORS,
    ),
    Mutation(
        "recovery does not wait until all streams are read",
        "storage/dispatch/leases.py",
        "if not self._suspects or not await self._all_read():",
        "if not self._suspects:",
        STEPS,
    ),
    Mutation(
        "the first message of a stream is not looked at",
        "storage/dispatch/leases.py",
        "there.first_seq <= last <= there.last_seq",
        "there.first_seq < last <= there.last_seq",
        STEPS,
    ),
    Mutation(
        "a step with damaged groups keeps its groups",
        "storage/dispatch/admission.py",
        "self._ledger.roll_back(step - 1)",
        "self._ledger.roll_back(step)",
        STEPS,
    ),
    Mutation(
        "the reader tells storage of a step too many",
        "storage/client/reader.py",
        "StepCommitted(step=step, incarnation",
        "StepCommitted(step=step + 1, incarnation",
        STEPS + LEARNER,
    ),
    Mutation(
        "the step after one that was trained again stays",
        "learner/progress/lineage.py",
        "while found and next(reversed(found)) >= line.step:",
        "while found and next(reversed(found)) > line.step + 1:",
        LEARNER,
    ),
    Mutation(
        "lines of a replaced learner count",
        "learner/progress/lineage.py",
        ("        if line.incarnation in replaced:\n            continue\n"),
        "",
        LEARNER,
    ),
    Mutation(
        "a line is joined to a torn one",
        "storage/disk/atomic_files.py",
        '                lines = "\\n" + lines\n',
        "                pass\n",
        LEARNER,
    ),
    Mutation(
        "the lineage is not brought to the disk",
        "learner/progress/lineage.py",
        "            os.fsync(file.fileno())",
        "            pass",
        LEARNER,
    ),
    Mutation(
        "groups of the saved step stay in the progress",
        "learner/progress/progress.py",
        "if int(step) > through}",
        "if int(step) >= through}",
        LEARNER,
    ),
    Mutation(
        "the lineage is not synced before a checkpoint",
        "learner/progress/progress.py",
        "    lineage.sync(settings.lineage)\n",
        "",
        LEARNER,
    ),
    Mutation(
        "groups of the newest checkpoint are forgotten",
        "learner/progress/progress.py",
        "if step < progress.step]",
        "if step <= progress.step]",
        LEARNER,
    ),
    Mutation(
        "a lineage of other groups is accepted",
        "learner/progress/progress.py",
        "    lineage.refuse_other_groups(path, groups)\n",
        "",
        LEARNER,
    ),
    Mutation(
        "storage may have given more groups than were trained",
        "learner/progress/progress.py",
        "        if answer != leases:",
        "        if set(answer) - set(leases):",
        LEARNER,
    ),
    Mutation(
        "storage hears of a commit before the progress is written",
        "learner/run/checkpointing.py",
        "        await self._named(progress)\n        await self._committed(step)",
        "        await self._committed(step)\n        await self._named(progress)",
        LEARNER,
    ),
    Mutation(
        "a checkpoint is committed that is not durable",
        "learner/run/checkpointing.py",
        "        await self._world.call(Rank.saved)\n",
        "",
        LEARNER,
    ),
    Mutation(
        "a multiple of save_every that was passed is not due",
        "learner/run/checkpointing.py",
        "step // save_every > saved // save_every",
        "step > saved and step % save_every == 0",
        LEARNER,
    ),
    Mutation(
        "groups of a step are recorded in another order",
        "learner/step/rl_step.py",
        "leases=tuple(group.lease_id for group in groups)",
        "leases=tuple(sorted(group.lease_id for group in groups))",
        LEARNER,
    ),
    Mutation(
        "weights of a step are recorded as 1",
        "learner/step/rl_step.py",
        "weights=tuple(group.weight for group in groups)",
        "weights=tuple(1.0 for group in groups)",
        LEARNER,
    ),
    Mutation(
        "groups are noted under the step before",
        "learner/run/train.py",
        "progress.groups[str(progress.step)] =",
        "progress.groups[str(progress.step - 1)] =",
        LEARNER,
    ),
    Mutation(
        "a resume tells storage a step too many",
        "learner/run/train.py",
        ("await self._reader.resumed(self.progress.step)\n        await self._publish()"),
        ("await self._reader.resumed(self.progress.step + 1)\n        await self._publish()"),
        LEARNER,
    ),
    Mutation(
        "another history is not refused on a resume",
        "learner/run/train.py",
        ("        await refuse_other_history(self.progress, self._settings.lineage, self._reader.given)\n"),
        "",
        LEARNER,
    ),
    Mutation(
        "retraining takes the version after the step",
        "learner/history/retrain.py",
        "policy_version=line.policy_version - 1",
        "policy_version=line.policy_version",
        LEARNER,
    ),
    Mutation(
        "retraining leaves out importance weights",
        "learner/history/retrain.py",
        "line.weights or [1.0] * len(groups)",
        "[1.0] * len(groups)",
        LEARNER,
    ),
    Mutation(
        "an excused lease is not told to storage",
        "actors/rollouts/worker.py",
        "await self._leases.ask(LeaseRequest(lease_id=lease.lease_id, excused=True), lease)",
        "pass",
        ACTORS,
    ),
    Mutation(
        "a settled lease is rolled out again",
        "actors/rollouts/leases.py",
        ('                if state.state == "settled":\n                    return None\n'),
        "",
        ACTORS,
    ),
    Mutation(
        "an interrupt strikes a Python session that runs no code",
        "actors/tools/python_session.py",
        "        if self._may_interrupt:\n",
        "        if self._count:\n",
        ("tests/actors/tools/test_python_session.py",),
    ),
)
