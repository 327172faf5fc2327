"""Tells what every rank of the learner's world does in a step: its own share of the data, its part of the
model."""

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from pydantic import JsonValue

from bus.codec import Json
from bus.errors import RANK_LOST, TrainingError, UnreadableGroupsError, WorldError, tells
from bus.messages import Probe
from bus.requests import GroupRef
from bus.trajectory import Groups
from learner.backends.contract.backend import Backend, StepResult
from learner.checkpoint.commit import PendingCheckpoint, start_checkpoint
from learner.config.process_settings import LearnerSettings
from learner.data.batches import StepBatch
from learner.data.demonstrations import Demonstrations
from learner.data.outcomes import ImportanceRatios
from learner.distributed.process_group import Peers, gathered
from learner.logprobs.logprobs import recorded_logprobs
from learner.logprobs.served_teachers import NO_ANSWERS, TeacherAnswers, ask_teachers
from learner.metrics.profiler import Profiler, RankProfile
from learner.model_directories.dtypes import published_dtype
from learner.model_directories.model_directory import stream_hf_directory
from learner.progress.failed_step import FailedStep
from learner.progress.progress import checkpoint_step, kept_steps
from learner.publication.adapter_directory import SUBDIRECTORY, write_adapter
from learner.publication.announcement import AdapterBase
from learner.publication.host_copy import Copied, HostCopy, copy_weights
from learner.publication.probe import scored_probe
from learner.publication.rank_tensors import OtherRanks, OwnTensors, Wish, answer_group
from learner.publication.tensor_encoder import TensorEncoder
from learner.publication.whole_model import WholeModel
from learner.step.rl_step import train_on
from learner.step.warmup import begin_reinforcement_learning, heldout_figures, warm_up_step
from storage.account.records import Copy
from storage.client.reader import ReplayReader
from storage.disk.atomic_files import filling
from storage.images.reader import ImageReader
from storage.model_files.model_reading import raw_config
from storage.weights.blob_stores import BlobStore

T = TypeVar("T")
Fetched: TypeAlias = tuple[Groups, TeacherAnswers]
OTHERS_POLL_S = 0.05
"""Seconds between two questions whether the other ranks have their groups."""


class Rank:
    """This process's part of the learner.

    All ranks call the same methods in the same order; most are collective. `World.call` calls any of them
    on all ranks: a coroutine in its turn, a plain method at once.

    Torch works on `thread` alone, which keeps the bus responsive: a CUDA device is chosen for each thread."""

    def __init__(
        self, backend: Backend, settings: LearnerSettings, *,
        reader: ReplayReader, demonstrations: Demonstrations | None, thread: Executor,
        heldout_demonstrations: Demonstrations | None = None,
        images: ImageReader | None = None, whole: WholeModel | None = None,
    ) -> None:  # fmt: skip
        """Take over the backend. `images` are those of a vision-language model; `whole` is the multimodal
        model that a text model is published in."""
        self.hf_config = backend.hf_config
        self.recorded: Mapping[str, NDArray[np.float32]] = {}
        """Log-probs of a few trajectories of the latest step (learner/logprobs/logprobs.py)."""
        self.trained_copies: list[Copy] = []
        """Every trajectory of the groups of the latest step, those of all ranks."""
        self.trained_ratios: Mapping[str, ImportanceRatios] = {}
        """Importance ratios of every trajectory that the latest step trained on, those of all ranks."""
        self.share, self.shares = backend.data_parallel_group.rank(), backend.data_parallel_group.size()
        self._backend = backend
        self._settings = settings
        self._images = images
        self._reader = reader
        self._demonstrations = demonstrations
        self._heldout_demonstrations = heldout_demonstrations
        self._thread = thread
        self._whole = whole
        self._profiler = Profiler()
        self._failed_step = FailedStep(settings.lineage.parent / "failed_step.json")
        self._host = HostCopy(published_dtype(settings.learner, settings.model), whole)
        self._answers = answer_group(settings.learner.world.collective_timeout_s)
        publication = settings.learner.publication
        self._tensors = OwnTensors(
            TensorEncoder(publication), self._answers, publication.snapshot_bytes_per_s, self.adapter_base
        )
        self._saving: PendingCheckpoint | None = None
        self._saved_step: int | None = None
        """Step of the checkpoint begun last, unless the backend has changed since."""
        served, timeout_s = settings.learner.served_teachers, settings.learner.world.collective_timeout_s
        self._peers = Peers(self.share, timeout_s) if served else None
        """Ranks that share this one's model, of which one asks the teachers behind servers; None without
        such."""
        self._fetching: dict[int, tuple[tuple[GroupRef, ...], asyncio.Task[Fetched]]] = {}
        """Says what is being fetched for each step: which groups, their trajectories, and what teachers
        behind servers think of them."""
        self._teachers_served = dict[str, str]()
        """Models of the servers of teachers, by the teachers' tags."""
        self._asking = set[int]()
        """Steps about whose groups teachers are being asked."""

    def fetch(self, step: int, shares: Sequence[tuple[GroupRef, ...]], given_to: str) -> None:
        """Begin to fetch this rank's share of the groups of `step`, whatever else goes on."""
        refs = shares[self.share]
        if step in self._fetching:  # some of the groups given before cannot be read
            self._fetching[step][1].cancel()
        task = asyncio.create_task(self._fetch(step, refs, given_to), name=f"fetch batch {step}")
        self._fetching[step] = refs, task

    async def _fetch(self, step: int, refs: Sequence[GroupRef], given_to: str) -> Fetched:
        """Fetch these groups. Those that cannot be read are reported first: a restart is given others.
        Teachers behind servers are asked here, where no rank waits in a collective for an answer."""
        vocab_size = self.hf_config.get_text_config().vocab_size
        try:
            groups = await self._reader.fetch(refs)
            refuse_other_tokens(groups, vocab_size)
        except UnreadableGroupsError as error:
            await self._reader.report_unreadable(step, error, given_to)
            raise
        if self._peers is None or not self._peers.is_first:
            return groups, NO_ANSWERS
        learner = self._settings.learner
        self._asking.add(step)
        try:
            return groups, await ask_teachers(
                groups, learner, vocab_size=vocab_size, served=self._teachers_served
            )
        finally:
            self._asking.discard(step)

    def waits_for_teachers(self, step: int) -> str:
        """Return which teachers this rank asks about the groups of a step, in words; empty if none."""
        if step not in self._asking:
            return ""
        served = self._settings.learner.served_teachers
        return " and ".join(f"the {tag} at {one.url}" for tag, one in served.items())

    async def fetched(self, step: int) -> None:
        """Return when this rank's groups of `step` are here; raises what fetching raised."""
        _, task = self._fetching[step]
        await asyncio.shield(task)

    def cancel_fetches(self) -> None:
        for _, task in self._fetching.values():
            task.cancel()
        self._fetching.clear()

    async def train(
        self, step: int, policy_version: int, baselines: Mapping[str, float]
    ) -> tuple[StepBatch, StepResult]:
        """Take one optimizer step on what was fetched for it by all, from weights of `policy_version`.

        `baselines` are those in the batch of the step before. The counts and the result are those of all
        ranks."""
        refs, task = self._fetching[step]
        groups, answers = await task
        self._saved_step = None
        del self._fetching[step]
        peers, learner = self._peers, self._settings.learner

        def work() -> tuple[StepBatch, StepResult]:
            mine = [Copy.of(trajectory) for group in groups for trajectory in group]
            by_share = dict(gathered((self.share, mine)))  # ranks that share a model have the same groups
            self.trained_copies = [copy for copies in by_share.values() for copy in copies]
            self.recorded = recorded_logprobs(self._backend, groups, learner, step=step)
            batch, result = train_on(
                self._backend,
                groups,
                [ref.weight for ref in refs],
                learner,
                step=step,
                policy_version=policy_version,
                baselines=baselines,
                answers=answers if peers is None else peers.from_first(answers),
            )
            of_ranks = gathered(result.ratios)
            self.trained_ratios = {name: found for each in of_ranks for name, found in each.items()}
            return batch, result

        return await self._step(f"step {step}", work)

    async def fetched_by_all(self, step: int) -> bool | None:
        """Return whether every rank has its groups of `step`, once each has them or knows why not; None while
        some do not: ask again.

        A rank that cannot read some has reported them by then: `step` is to be leased and fetched again. None
        waits in a collective, whose time is bounded, while another waits for the bus. Raises whatever else
        this rank's fetch raised."""
        _, task = self._fetching[step]
        done, readable = zip(*await self.in_thread(lambda: gathered(_state(task))), strict=True)
        if not all(done):
            await asyncio.wait({task}, timeout=OTHERS_POLL_S)
            return None
        with suppress(UnreadableGroupsError):
            task.result()
        return all(readable)

    async def warm_up(self, step: int) -> StepResult:
        self._saved_step = None
        return await self._step(
            f"step {step} of the warm-up",
            lambda: warm_up_step(self._backend, self._settings, self._demonstrations, step),
        )

    async def _step(self, name: str, work: Callable[[], T]) -> T:
        """Run an optimizer step. Raises `TrainingError` where it does not fit into the device's memory, and
        `ConfigError` where it failed before the latest start, too."""
        with self._failed_step.noted(name):
            return await self._fitting(work)

    async def _fitting(self, work: Callable[[], T]) -> T:
        try:
            return await self.in_thread(work)
        except torch.OutOfMemoryError as error:
            learner = self._settings.learner
            full = learner.parallel.recompute == "full"
            raise TrainingError(
                f"a step does not fit into the memory of the device of rank {dist.get_rank()}: "
                f"{'' if full else 'set learner.parallel.recompute=full, or '}lower "
                f"learner.batch.tokens_per_micro_batch={learner.batch.token_budget}; `launch plan` tells "
                f"what fits ({error})"
            ) from error

    async def heldout_figures(self) -> dict[str, float]:
        """Return the mean loss of the held-out demonstrations and what else is measured of them."""
        heldout = self._heldout_demonstrations
        assert heldout is not None, "asked where warmup.heldout names some"
        settings = self._settings
        return await self.in_thread(
            lambda: heldout_figures(self._backend, settings.warmup, settings.learner.batch, heldout)
        )

    async def begin_reinforcement_learning(self) -> None:
        """Leave the warm-up (learner/step/warmup.py)."""
        self._saved_step = None
        await self.in_thread(lambda: begin_reinforcement_learning(self._backend, self._settings))

    async def export(self) -> None:
        """Write the trained model as a Hugging Face directory, tensor by tensor, on rank 0. Adapters are in
        whole weights there, and alone in a directory of peft's below it. Until all is written, the directory
        is as it was."""
        await self.in_thread(self._export)

    def _export(self) -> None:
        backend, settings, is_first = self._backend, self._settings, dist.get_rank() == 0
        weights, adapters, alone = backend.streamed(), backend.adapters, {}
        if self._whole is not None:
            weights = self._whole.streamed(weights)
        with ExitStack() as opened:
            try:
                if is_first:
                    directory = opened.enter_context(filling(settings.export, replaces=True))
                    stream_hf_directory(
                        directory,
                        backend.hf_config if self._whole is None else self._whole.config,
                        weights,
                        settings.model_directory,
                        tensors=None if self.adapter_base else self._host.tensors,
                    )
            finally:  # even if the disk refuses: the other ranks wait until theirs are taken
                deque(weights, maxlen=0)
                if adapters is not None:
                    alone = {name: tensor.cpu().clone() for name, tensor in adapters.streamed()}
            if adapters is not None and is_first:
                named = settings.model.path if settings.model.from_run is None else None
                model = str(named or settings.model_directory)
                write_adapter(directory / SUBDIRECTORY, adapters, alone, model)

    def text_config(self) -> dict[str, Json] | None:
        """Return the config.json of the text model that is published alone; None where the published weights
        are those of the model directory's own config.json."""
        described = raw_config(self._settings.model_directory).get("model_type")
        if self._whole is not None or described == self.hf_config.model_type:
            return None
        config: dict[str, Json] = json.loads(self.hf_config.to_json_string())
        return config

    async def copy_weights(self) -> Copied:
        """Return the weights on their way to the ranks' hosts, to be published. They stay until the copy
        after the next, or until nobody needs them."""
        copying: Future[Copied] = Future()
        if dist.get_rank() > 0:
            self._tensors.begin(copying)
        try:
            copied = await translated(copy_weights(self._host, self._backend, self._thread))
        except BaseException as error:
            copying.set_exception(error)  # rank 0 may wait for them already
            raise
        copying.set_result(copied)
        return copied

    def publishing_to(self, store: BlobStore) -> AbstractAsyncContextManager[None]:
        """Have a rank other than 0 store there, inside, what it publishes."""
        return self._tensors.stored_in(store)

    def fulfil(self, wish: Wish) -> None:
        """Do what rank 0 wants of the tensors that another rank has."""
        if dist.get_rank() > 0:
            self._tensors.fulfil(wish)

    def other_ranks(self, send: Callable[[Wish], Awaitable[None]]) -> OtherRanks | None:
        """Return the ranks besides this one, rank 0; `send` has every rank `fulfil` a wish."""
        return None if self._answers is None else OtherRanks(self._host, self._answers, send)

    async def score_probe(self) -> Probe:
        """Return the probe as the weights are now score it (learner/publication/probe.py)."""
        return await self.in_thread(lambda: scored_probe(self._backend, self._images))

    async def begin_profile(self) -> None:
        await self.in_thread(self._profiler.begin)

    async def end_profile(self, directory: Path) -> list[RankProfile]:
        """Write the traces; return what that of each rank says."""
        return await self.in_thread(lambda: gathered(self._profiler.end(directory, dist.get_rank())))

    async def release_memory(self) -> None:
        """Leave to others what the next step does not need of the device; the step takes it again."""
        await self.in_thread(self._backend.release_memory)

    @property
    def adapter_base(self) -> AdapterBase | None:
        """Return what published adapters belong to; None where whole weights are published."""
        return self._host.adapter_base(self._backend.adapters)

    @property
    def copy_s(self) -> float:
        """Return the seconds of the latest `copy_weights` that torch's work took."""
        return self._host.seconds

    async def save(self, step: int, extra: Mapping[str, JsonValue]) -> None:
        """Begin to write a checkpoint, while training goes on; `extra` counts at rank 0. Where the backend
        has not changed since the checkpoint of this step, `extra` alone is written."""
        last, self._saved_step = self._saved_step, step
        if self._saving is not None and last == step:
            await self.in_thread(partial(self._saving.amend, extra))
            return
        root, keep, before = self._settings.checkpoints, self._settings.learner.checkpoint.keep, self._saving
        backend, named, kept = self._backend, checkpoint_step(extra), kept_steps(extra)
        self._saving = await self.in_thread(
            lambda: start_checkpoint(backend, root, named, extra, keep=keep, besides=kept, after=before)
        )

    @property
    def checkpoint_figures(self) -> dict[str, float]:
        """Return the parts of the time of the checkpoint begun last."""
        parts = {} if self._saving is None else dict(self._saving.seconds)
        return {f"time/checkpoint_{part}_s": seconds for part, seconds in parts.items()}

    async def written(self) -> bool:
        """Tell whether every rank has written its part of the checkpoint begun last."""
        mine = self._saving is None or self._saving.written
        return all(await self.in_thread(lambda: gathered(mine)))

    async def saved(self) -> None:
        """Return when the checkpoint begun last survives a power cut."""
        if self._saving is not None:
            await self.in_thread(self._saving.finish)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run torch work where all of it runs. Raises `WorldError` when another rank was lost meanwhile."""
        return await in_thread(self._thread, work)


def refuse_other_tokens(groups: Groups, vocab_size: int) -> None:
    """Raise `UnreadableGroupsError` for groups with token ids that the model has no embedding of. A shard
    refuses them where it knows the vocabulary; on CUDA such an id ends the process by an assert."""
    highest = ((t.lease_id, int(t.token_ids.max(initial=-1))) for group in groups for t in group)
    if lost := {lease: token for lease, token in highest if token >= vocab_size}:
        lease, token = next(iter(lost.items()))
        raise UnreadableGroupsError(
            f"group {lease} has token id {token}, of a vocabulary of {vocab_size}: another tokenizer?",
            tuple(lost),
        )


def _state(task: asyncio.Task[Fetched]) -> tuple[bool, bool]:
    """Return whether a rank's fetch has ended, and whether it met no group that cannot be read."""
    done = task.done()
    unreadable = done and not task.cancelled() and isinstance(task.exception(), UnreadableGroupsError)
    return done, not unreadable


async def in_thread(thread: Executor, work: Callable[[], T]) -> T:
    """Run `work` on `thread`. Raises `WorldError` when a collective in it lost another rank."""
    return await translated(asyncio.get_running_loop().run_in_executor(thread, work))


async def translated(work: Awaitable[T]) -> T:
    """Return what `work` returns. Raises `WorldError` when a collective in it lost another rank."""
    try:
        return await work
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or tells(error, RANK_LOST):
            raise WorldError(f"rank {dist.get_rank()} of the learner lost another: {error}") from error
        raise
