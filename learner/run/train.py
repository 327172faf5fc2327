"""The learner's loop, top to bottom: warm up, then take batches, step, publish, until done."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import asdict, replace
from functools import partial

from bus.codec import Json
from bus.connection import Bus
from bus.connection.status import Activity, report_status
from bus.errors import ConfigError, NoActorsError
from bus.evaluation_messages import EvaluationResult
from bus.messages import Metrics, Probe
from bus.process.work_progress import tracked
from bus.requests import BatchLease
from bus.security.permissions import COUNTERS
from bus.waiting import ended_before, ended_soon_after
from learner.backends.contract.backend import StepResult
from learner.config.process_settings import LearnerSettings, shared_kernels
from learner.data.balancing import FORWARD_AND_BACKWARD
from learner.data.batches import StepBatch
from learner.metrics import trained_facts, trained_logprobs
from learner.metrics.alarms import LearningAlarm, PolicyAlarm
from learner.metrics.step_metrics import StepReporter, batch_values, read_values, step_values
from learner.metrics.trained_facts import TrainedFacts
from learner.metrics.utilisation import utilisation
from learner.model_directories.dtypes import published_dtype
from learner.progress import lineage
from learner.progress.progress import Progress, refuse_other_history
from learner.publication.broadcast import Broadcaster
from learner.publication.host_copy import Copied
from learner.publication.probe import ProbeTurns
from learner.publication.publisher import WeightPublisher
from learner.publication.tensor_encoder import publishing_threads
from learner.publication.unchanged_weights import why_unchanged
from learner.run.checkpointing import BestCheckpoint, Checkpointing
from learner.run.colocation import Device
from learner.run.evaluation import HeldOut
from learner.run.next_batch import LongWait, NextBatch
from learner.run.profiling import Profiling
from learner.step.rl_step import lineage_line
from learner.world.rank import Rank
from learner.world.world import World
from storage.account.records import TRAINED, AccountRecord, AccountWriter, Kind
from storage.client.reader import ReplayReader
from storage.metrics.spans import span
from storage.weights.blob_stores import BlobStore

LAST_WORDS_S = 5.0
"""A learner that stops waits no longer for storage to answer."""


class Learner:
    """One incarnation of a run's learner: rank 0 of its world."""

    def __init__(
        self, bus: Bus, settings: LearnerSettings, world: World, progress: Progress, *,
        reader: ReplayReader, store: BlobStore, incarnation: str, stop: asyncio.Event,
    ) -> None:  # fmt: skip
        self.progress = progress
        self._bus = bus
        self._settings = settings
        self._world = world
        self._incarnation = incarnation
        self._stop = stop
        self._reader = reader
        self._account = AccountWriter(settings.lineage.parent / TRAINED, incarnation)
        """Account of what each step trained on."""
        self._activity, self._waits = Activity("starting"), {"batch": "", "devices": ""}
        self._long_wait = LongWait(settings.lineage.parent / "waiting.json")
        publication = settings.learner.publication
        self._policy_alarm = PolicyAlarm(settings.learner.diagnostics)
        self._learning_alarm = LearningAlarm()
        kept = settings.export.parent / "kept-versions"
        self._weights = WeightPublisher(
            bus, store, publication,
            incarnation=incarnation, kept=kept, base=world.rank.adapter_base,
            others=world.rank.other_ranks(lambda wish: world.send(Rank.fulfil, wish)),
            kernels=shared_kernels(settings.model), pause_reason=lambda: self._policy_alarm.pause_reason,
        )  # fmt: skip
        self._broadcaster = Broadcaster(
            bus, self._weights.announced, incarnation=incarnation,
            timeout_s=publication.broadcast_timeout_s, threads=publishing_threads(publication),
            device_bytes=publication.broadcast_device_bytes, hashed=publication.broadcast_digests,
            together=publication.broadcast_together,
        )  # fmt: skip
        self._device = Device(
            bus, settings.colocation,
            incarnation=incarnation, release_memory=partial(world.call, Rank.release_memory),
            on_wait=partial(self._waits.__setitem__, "devices"),
        )  # fmt: skip
        evaluation = settings.evaluation
        self._heldout = HeldOut(
            bus, incarnation, self._on_evaluation, evaluation.patience_s, evaluation.sets,
            kept_answers=evaluation.kept_answers, samples=evaluation.samples,
        )  # fmt: skip
        self._best = BestCheckpoint(evaluation.best, progress, warms_up=settings.warmup.steps > 0)
        self._publishing: asyncio.Task[None] | None = None
        self._probes = ProbeTurns(at_each=settings.model.numerics != "fast")
        self._next_batch = NextBatch(
            reader, world, progress,
            steps=settings.learner.steps, on_wait=partial(self._waits.__setitem__, "batch"),
        )  # fmt: skip
        self._checkpoints = Checkpointing(
            settings, world, progress,
            prepared=self._weights.kept_written, committed=self._tell_committed, on_doing=self._note_doing,
        )  # fmt: skip
        self._tasks = asyncio.TaskGroup()
        """What runs beside the loop. An error there ends the learner."""
        self._steps = StepReporter(bus, incarnation, self._tasks, settings.diagnostics)
        self._profiling = Profiling(bus, world, settings.lineage.parent)
        self._tokens_per_s = 0.0
        self._checkpoint_s = 0.0
        """Seconds that training has waited for checkpoints since the step before."""
        self._joined = False

    async def run(self) -> None:
        """Train until the configured end, or until `stop`; either way the state is saved. After a failure it
        is that of the checkpoint begun last, if all ranks can still write it."""
        try:
            await self._run()
        except BaseException as error:
            await self._checkpoints.rescue(error)
            raise

    async def _run(self) -> None:
        stop, finished = self._stop, asyncio.Event()
        async with self._tasks as tasks:
            tasks.create_task(
                report_status(
                    self._bus, source="learner", role="learner", look=self._look, stop=finished,
                    waits_for=lambda: "" if self._joined else "the first publication of its weights",
                )
            )  # fmt: skip
            tasks.create_task(self._long_wait.keep_noted(self._waits_long, finished), name="note long waits")
            tasks.create_task(self._weights.serve(finished), name="publish snapshots")
            tasks.create_task(self._profiling.serve(finished), name="answer launch profile")
            tasks.create_task(self._weights.keep_announced(finished), name="keep the policy announced")
            try:
                joining = asyncio.create_task(self._join())
                if await ended_before(stop, joining):
                    await self._warm_up()
                    await self._reinforce()
                    await self._conclude()
                else:
                    joining.cancel()
            finally:
                finished.set()
                await self._next_batch.drop()
                await self._broadcaster.close()
                await self._weights.close()
                await asyncio.to_thread(self._account.close)

    async def _join(self) -> None:
        self._activity = Activity("joining the run")
        await self._device.start()
        await self._heldout.find()
        if self._settings.learner.target_accuracy and self._heldout.prompts is None:
            raise ConfigError("learner.target_accuracy needs held-out prompts: set data.heldout or data.task")
        await refuse_other_history(self.progress, self._settings.lineage, self._reader.given)
        published = published_dtype(self._settings.learner, self._settings.model)
        await self._weights.start(
            self._settings.model_directory,
            dtype=str(published).removeprefix("torch."),
            config=self._world.rank.text_config(),
        )
        await self._broadcaster.start()
        await self._reader.resumed(self.progress.step)
        await self._publish()
        await self._published()
        self._joined = True
        lacks = self.progress.lacks_evaluation(self._settings.evaluation.every_versions)
        if self.progress.policy_version == 0 or self._best.asks_again or lacks:
            await self._evaluate()

    # --- warm-up ---

    async def _warm_up(self) -> None:
        progress = self.progress
        if progress.stage != "warmup":
            return
        async with self._device.held(self._stop) as ours:
            if not ours or not await self._warmed_up():
                return
            await self._world.call(Rank.begin_reinforcement_learning)
            progress.end_warm_up(has_trained=self._settings.warmup.steps > 0)
            await self._publish()
        await self._published()
        if progress.policy_version > 0:
            await self._evaluate()
        await self._checkpoints.begin()

    async def _warmed_up(self) -> bool:
        """Take all steps on demonstrations; return False if `stop` came before the last."""
        progress, warmup = self.progress, self._settings.warmup
        steps, latest = range(progress.warmup_step, warmup.steps), ""
        for step in tracked(steps, "warming up on demonstrations"):
            if self._stop.is_set():
                break
            started = time.monotonic()
            now = f"step {progress.warmup_step + 1} of {warmup.steps}{latest}"
            self._activity = Activity(f"warming up on demonstrations, {now}")
            result = await self._world.call(Rank.warm_up, step)
            progress.warmup_step += 1
            progress.warmup_s += time.monotonic() - started
            latest = f", loss {result.loss:.4g}"
            values = step_values(result)
            done = progress.warmup_step
            if warmup.heldout is not None and (done % warmup.heldout_every == 0 or done == warmup.steps):
                measured = await self._world.call(Rank.heldout_figures)
                values |= {f"heldout/{name}": value for name, value in measured.items()}
                self._learning_alarm.look_at_heldout(measured["loss_nats"])
            self._steps.report("warmup", done, values)
            await self._profiling.after_step(done, values)
            if done < warmup.steps:  # else the next checkpoint begins reinforcement learning
                await self._checkpoints.after_step()
        return not self._stop.is_set()

    # --- reinforcement learning ---

    async def _reinforce(self) -> None:
        progress, learner = self.progress, self._settings.learner
        await self._bus.listen(self._bus.subject(COUNTERS), Metrics, self._policy_alarm.hear)
        while progress.stage == "rl" and progress.step < learner.steps and not self._stop.is_set():
            with span("step", step=progress.step + 1):
                has_trained = await self._step()
            if has_trained:
                stepped = time.monotonic()
                await self._checkpoints.after_step()
                self._checkpoint_s = time.monotonic() - stepped
                if progress.target_reached_step is not None and await self._latest_reaches_target():
                    return
                if self._best.keeps(progress.step) and self._checkpoints.saved_step != progress.step:
                    await self._checkpoints.begin()

    async def _step(self) -> bool:
        """Take one optimizer step and publish; return False if `stop` came before it."""
        progress = self.progress
        started = time.monotonic()
        self._activity = Activity("waiting for the batch", wait="batch")
        try:
            with span("wait for the batch"):
                lease = await self._next_batch.take(progress.step + 1, self._stop)
        except NoActorsError:  # what is trained stays: who mends the cause goes on from here
            await self._checkpoints.begin()
            await self._checkpoints.finish()
            raise
        if lease is None:
            return False
        waited = time.monotonic() - started
        if progress.step == 0 and self._settings.evaluated_on == "rollout":
            await self._accuracy_now()  # the first groups are here: so is somebody who can measure it
            started = time.monotonic() - waited  # the step's time goes without it
        self._activity = Activity(f"training step {progress.step + 1}")
        async with self._device.held(self._stop) as ours:
            if not ours:
                return False
            with span("train"):
                batch, result = await self._train_on(lease)
            trained = time.monotonic()
            self._policy_alarm.look(result.diagnostics.get("mismatch_nats"))
            progress.step += 1
            progress.policy_version += 1
            progress.baselines = dict(batch.baselines)
            progress.groups[str(progress.step)] = [group.lease_id for group in lease.groups]
            progress.trajectories_trained += batch.trajectories
            progress.tokens_trained += batch.tokens
            progress.steps_skipped += result.skipped
            progress.max_staleness_seen = max(progress.max_staleness_seen, batch.staleness_max)
            self._activity = Activity("publishing weights")
            await self._publish(result, why_unchanged(batch, result))
        every = self._settings.evaluation.every_versions
        if every and progress.step % every == 0:
            await self._published()
            await self._evaluate()
        seconds = time.monotonic() - started
        progress.rl_s += seconds
        self._tokens_per_s = batch.tokens / seconds
        trained_on = batch_values(batch)
        self._learning_alarm.look(progress.step, trained_on)
        computed = 1 - result.left_out_tokens / max(1, result.tokens)
        flops = FORWARD_AND_BACKWARD * self._world.forward_flops(lease) * computed
        used = await self._world.rank.in_thread(partial(utilisation, result.seconds, flops))
        row: dict[str, Json] = {
            **trained_on, **step_values(result),
            "time/step_s": seconds, "time/waiting_for_batch_s": waited,
            "time/publish_stall_s": time.monotonic() - trained,
            "time/publish_copy_s": self._world.rank.copy_s, "time/checkpoint_s": self._checkpoint_s,
            **used, **self._weights.figures, **self._device.figures, **self._world.rank.checkpoint_figures,
            "train/policy_version": progress.policy_version, **read_values(self._reader.read),
        }  # fmt: skip
        self._steps.report("rl", progress.step, row)
        await self._profiling.after_step(progress.step, row)
        self._policy_alarm.end_run()
        return True

    async def _train_on(self, lease: BatchLease) -> tuple[StepBatch, StepResult]:
        version = self.progress.policy_version
        batch, result = await self._world.call(Rank.train, lease.step, version, self.progress.baselines)
        copies = self._world.rank.trained_copies
        trained = [AccountRecord(Kind.TRAINED, copy, lease.step) for copy in copies]
        await asyncio.to_thread(self._account.add, trained)
        line = lineage_line(lease.step, version + 1, self._incarnation, lease.groups, batch, result)
        await asyncio.to_thread(lineage.record, self._settings.lineage, line)
        run, recorded = self._settings.lineage.parent, self._world.rank.recorded
        await asyncio.to_thread(trained_logprobs.write, run, lease.step, version, recorded)
        ratios = self._world.rank.trained_ratios
        facts = {
            one.trajectory_id: TrainedFacts(one.advantage, ratios.get(one.trajectory_id))
            for one in batch.outcomes.each
        }
        await asyncio.to_thread(trained_facts.write, run, lease.step, facts)
        return batch, result

    # --- the end ---

    async def _latest_reaches_target(self) -> bool:
        """Evaluate the weights as they are; go on if sampling noise had flattered an older version."""
        accuracy = await self._accuracy_now()
        target = self._settings.learner.target_accuracy
        reached = target is not None and accuracy is not None and accuracy >= target
        if not reached:
            self.progress.target_reached_step = None
        return reached

    async def _conclude(self) -> None:
        await self._profiling.end()
        await self._next_batch.drop()
        await self._tell(self._reader.resumed(self.progress.step))
        await self._published()
        await self._accuracy_now()
        await self._checkpoints.begin()
        await self._checkpoints.finish()  # before the export, which may fail: then nothing is trained twice
        copied = None if self._stop.is_set() else await self._exported()
        if copied is not None:
            self.progress.stage = "done"
            self._heldout.warn_of_missing()
            await self._checkpoints.begin()
            await self._checkpoints.finish()
            latest = self._weights.latest
            self._announce(copied, latest.probe if latest is not None else None)
            await self._published()

    async def _accuracy_now(self) -> float | None:
        """Return the held-out sampled accuracy of this version; None if nobody measures it, or on `stop`."""
        version = self.progress.policy_version
        if not self._heldout.measures or self._stop.is_set():
            return None
        await self._published()
        if self.progress.sampled_accuracy(version) is None or self._heldout.awaits(version):
            await self._evaluate()
            self._activity = Activity(f"waiting for the evaluation of version {version}", wait="evaluation")
            await self._heldout.measured(version, self._stop)
        return self.progress.sampled_accuracy(version)

    async def _exported(self) -> Copied | None:
        """Export, before the run is done, and return the copied weights; None if `stop` came first."""
        copied = None
        async with self._device.held(self._stop) as ours:
            if ours:
                self._activity = Activity("exporting")
                await self._world.call(Rank.export)
                copied = await self._world.call(Rank.copy_weights)
        return copied

    # --- publication and evaluation ---

    async def _publish(self, result: StepResult | None = None, why: str = "") -> None:
        """Copy the weights, then publish them while training goes on; one publication at a time."""
        await self._published()
        probe = None
        if self._settings.learner.publication.probe and not self._settings.warmup.loss.facts.of_scores:
            # engines may use the first version of a stage for long, and only a scored one ends an alarm
            needed = result is None or bool(self._policy_alarm.text)
            probe = await self._probes.scored(lambda: self._world.call(Rank.score_probe), needed=needed)
        copied = await self._world.call(Rank.copy_weights)
        self._announce(copied, probe, result, why)

    def _announce(
        self, copied: Copied, probe: Probe | None, result: StepResult | None = None, why: str = ""
    ) -> None:
        progress = self.progress
        is_trained = progress.step == 0 or not self._settings.learner.only_critic_trains(progress.step)

        async def publish(version: int, stage: str, trains_from: int) -> None:
            with span("publish weights", policy_version=version):
                tensors = await copied.arrived()
                await self._weights.publish(
                    tensors,
                    policy_version=version,
                    stage=stage,
                    trains_from=trains_from,
                    probe=probe,
                    is_trained=is_trained,
                    ess_fraction=None if result is None else result.ess_fraction,
                    why_unchanged=why,
                )

        # of the group: where nobody awaits it, since no batch comes without its version, it ends the learner
        self._publishing = self._tasks.create_task(
            publish(progress.policy_version, progress.stage, progress.trains_from), name="publish weights"
        )

    async def _published(self) -> None:
        if self._publishing is not None:
            await self._publishing
            self._publishing = None

    async def _evaluate(self) -> None:
        manifest = self._weights.latest
        if manifest is None or self._heldout.was_asked(manifest.policy_version):
            return
        if self._heldout.measures:
            self._weights.pin(manifest.policy_version)
            self._best.asked(manifest.policy_version)
            await self._heldout.ask(manifest)

    def _on_evaluation(self, result: EvaluationResult) -> None:
        self._best.on_result(result)
        if not self._heldout.awaits(result.policy_version):
            self._weights.unpin(result.policy_version)
        if not result.data_set:
            self.progress.note_evaluation(
                result.policy_version, result.sampled, result.greedy,
                target=self._settings.learner.target_accuracy,
            )  # fmt: skip

    async def _tell_committed(self, step: int) -> None:
        await self._tell(self._reader.committed(step))

    async def _tell(self, telling: Coroutine[None, None, None]) -> None:
        """Storage must hear it, unless we stop: the next learner's `resumed` repairs what is missing."""
        await ended_soon_after(self._stop, telling, LAST_WORDS_S)

    # --- what others see ---

    def _note_doing(self, doing: str) -> None:
        self._activity = Activity(doing)

    def _now(self) -> Activity:
        now = self._activity
        if now.wait == "batch" and (teachers := self._world.rank.waits_for_teachers(self.progress.step + 1)):
            now = Activity(f"waiting for {teachers}", wait="teachers")
        if devices := self._waits["devices"]:
            return replace(now, wait="device", reason=devices)
        return replace(now, reason=self._waits["batch"]) if now.wait == "batch" else now

    def _waits_long(self) -> dict[str, Json] | None:
        progress = self.progress
        return self._long_wait.look(self._now(), progress.warmup_step, progress.step)

    def _alarms(self) -> dict[str, Json]:
        found = {"policy": self._policy_alarm.text, "weights": self._weights.alarm}
        return {name: text for name, text in (found | self._learning_alarm.alarms).items() if text}

    def _look(self) -> Activity:
        progress, alarms = self.progress, self._alarms()
        values: dict[str, Json] = {
            "stage": progress.stage,
            "step": progress.step,
            "warmup_step": progress.warmup_step,
            "policy_version": progress.policy_version,
            "trajectories_trained": progress.trajectories_trained,
            "max_staleness_seen": progress.max_staleness_seen,
            "trained_tokens_per_s": self._tokens_per_s,
            "alarm": "; ".join(map(str, alarms.values())),
            "alarms": alarms,
            "best": None if progress.best is None else asdict(progress.best),
            "waiting": self._waits_long(),
        }
        return replace(self._now(), values=values)
