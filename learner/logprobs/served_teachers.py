"""Asks the teachers that are behind servers about a step's trajectories, before the step needs to know.

Each is asked over HTTP about the trajectories of one data-parallel rank, so nothing here is a collective or
needs torch's thread: a rank may ask while it trains the step before."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from bus.errors import ConfigError, EngineError, RequestRefusedError
from bus.trajectory import Groups
from bus.waiting import cancelled
from learner.config.frozen_policies import TeacherConfig, teacher_settings
from learner.config.learner import LearnerConfig
from learner.config.process_settings import EngineContext
from learner.data.batches import recorded_samples
from learner.data.packing import Sample
from learner.data.top_tokens import TopTokens
from learner.logprobs.teacher_answers import Entries, Tops, read_logprobs, read_top_tokens
from learner.logprobs.teacher_server import TeacherServer, all_of
from learner.model_directories.model_directory import load_hf_config, load_tokenizer

log = structlog.get_logger()
COMPARED_TOKENS = 64
"""Tokens of the policy's vocabulary whose texts are compared with the server's."""
KEPT_BACK = 6
"""Tokens of its context by which `max_req_input_len` of SGLang is smaller; a request has fewer than that."""
STOP_POLL_S = 0.2
ANY_CONTEXT = EngineContext()


@dataclass(frozen=True, slots=True)
class TeacherAnswers:
    """What teachers behind servers think of the samples of a rank; each by the teacher's tag, in the order of
    the samples that it teaches."""

    logprobs: Mapping[str, Sequence[NDArray[np.float32]]] = field(default_factory=dict)
    """float32 [L] nats of teachers of sampled tokens; NaN at tokens that are not trained."""
    top_tokens: Mapping[str, Sequence[TopTokens]] = field(default_factory=dict)
    """What teachers of whole distributions find likeliest."""


NO_ANSWERS = TeacherAnswers()


async def ask_teachers(
    groups: Groups, learner: LearnerConfig, *, vocab_size: int, served: dict[str, str] | None = None
) -> TeacherAnswers:
    """Return what the teachers behind servers think of the trained trajectories of these groups.

    Args:
        groups: the groups of a step.
        learner: its settings name the teachers.
        vocab_size: the policy's.
        served: models of the servers by the teachers' tags, as they were in earlier steps; a server that has
            another one now was started again as another teacher, which is an error.

    Raises `ConfigError` for tokens of which a server cannot give what the loss
    wants, and `EngineError` for a server that was away for too long or whose answers cannot be used."""
    teachers = learner.served_teachers
    if not teachers:
        return NO_ANSWERS
    samples = recorded_samples(groups)
    logprobs, top_tokens = {}, {}
    for tag, teacher in teachers.items():
        taught = [sample for sample in samples if teacher.teaches(sample.source)]
        for sample in taught:
            _refuse_other_distribution(tag, teacher, sample)
        async with TeacherServer(tag, teacher) as server:
            if served is not None:
                await _refuse_another_model(tag, server, served)
            if teacher.kl == "sampled":
                logprobs[tag] = await all_of([_logprobs(server, sample) for sample in taught])
            else:
                count = teacher.top_k or 0
                top_tokens[tag] = await all_of(
                    [_top_tokens(server, sample, count, vocab_size) for sample in taught]
                )
    return TeacherAnswers(logprobs, top_tokens)


async def _refuse_another_model(tag: str, server: TeacherServer, served: dict[str, str]) -> None:
    name = (await server.model()).name
    if (before := served.setdefault(tag, name)) != name:
        raise EngineError(
            f"the {tag} at {server.url} is {name} now, and was {before}: serve that again, or begin another "
            "run with this one"
        )


def teachers_asked(groups: Groups, learner: LearnerConfig, *, vocab_size: int) -> TeacherAnswers:
    """Do what `ask_teachers` does from a thread in which no event loop runs."""
    if not learner.served_teachers:
        return NO_ANSWERS
    return asyncio.run(ask_teachers(groups, learner, vocab_size=vocab_size))


def refuse_other_teachers(
    learner: LearnerConfig, model_directory: Path, stopped: Callable[[], bool] = lambda: False, *,
    engine_context: EngineContext = ANY_CONTEXT,
) -> None:  # fmt: skip
    """Raise `ConfigError` for a server whose model has another vocabulary than the one in `model_directory`,
    or refuses the longest trajectories of that model: those that fill the context of the actors' engines.

    It waits for servers that are away, as `ask_teachers` does, and raises as that does; it returns once
    `stopped()` is true. No event loop may run in this thread."""
    if learner.served_teachers:
        context = load_hf_config(model_directory).get_text_config().max_position_embeddings
        longest = engine_context.longest_trajectory(context)
        checking = _refuse_other_teachers(learner.served_teachers, model_directory, longest)
        asyncio.run(_unless(stopped, checking))


async def _unless(stopped: Callable[[], bool], checking: Coroutine[None, None, None]) -> None:
    task = asyncio.create_task(checking)
    while not (await asyncio.wait([task], timeout=STOP_POLL_S))[0]:
        if stopped():
            await cancelled(task)
            return
    task.result()


async def _refuse_other_teachers(
    teachers: Mapping[str, TeacherConfig], model_directory: Path, longest: int
) -> None:
    tokenizer = load_tokenizer(model_directory)
    known = sorted(tokenizer.get_vocab().values())
    chosen = [known[n] for n in np.linspace(0, len(known) - 1, min(COMPARED_TOKENS, len(known)), dtype=int)]
    texts = [tokenizer.decode([token]) for token in chosen]
    for tag, teacher in teachers.items():
        async with TeacherServer(tag, teacher) as server:
            model = await server.model()
            if not model.generates:
                raise ConfigError(f"the {tag} at {server.url} is {model.name}, which scores no tokens")
            if model.longest is not None and model.longest < longest:
                missing = longest - model.longest
                raise ConfigError(
                    f"the {tag} at {server.url} ({model.name}) takes {model.longest} tokens in a request, "
                    f"and a trajectory that fills the policy's context has {longest}: serve it with "
                    f"--context-length {longest + KEPT_BACK + 1} or more (which may need the variable "
                    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1) and a cache that holds as many, or have "
                    f"the policy's SGLang engines leave {missing} tokens out, with "
                    "actors.engine.server.context_length"
                )
            refuse = partial(_refuse_other_texts, f"the {tag} at {server.url} ({model.name})", chosen, texts)
            try:
                await server.scored(chosen, refuse, begin=0, with_texts=model.knows_texts)
            except RequestRefusedError as error:
                raise ConfigError(
                    f"the {tag} at {server.url} refuses ids of the policy in {model_directory}, up to "
                    f"{chosen[-1]}: serve a model with the policy's vocabulary ({error})"
                ) from error
            log.info("teacher_found", teacher=tag, url=server.url, model=model.name)


def _refuse_other_texts(
    what: str, token_ids: Sequence[int], texts: Sequence[str], entries: Entries, _: Tops
) -> None:
    """Raise `ConfigError` where a token has another text at the server, and `EngineError` without log-probs.

    How a text is set off from the one before it is not compared: that depends on the version of the
    tokenizer's library."""
    read_logprobs(entries[1:])
    other = [
        (token, ours, theirs)
        for (_, told, theirs), token, ours in zip(entries, token_ids, texts, strict=True)
        if theirs is not None and told == token and theirs.strip() != ours.strip()
    ]
    if other:
        token, ours, theirs = other[0]
        raise ConfigError(
            f"{what} has another vocabulary than the policy: {len(other)} of {len(token_ids)} tokens have "
            f"other texts, as {token}, which is {ours!r} here and {theirs!r} there: serve a model with the "
            "policy's tokenizer"
        )


def _refuse_other_distribution(tag: str, teacher: TeacherConfig, sample: Sample) -> None:
    """Raise `ConfigError` where trained tokens are of another distribution than a server gives: that of the
    whole vocabulary at temperature 1."""
    temperatures = np.broadcast_to(sample.streams["temperatures"], sample.loss_mask.shape)
    other = np.unique(temperatures[_trained(sample)])
    if len(other) and not np.array_equal(other, [1.0]):
        raise ConfigError(
            f"{sample.name} was sampled at temperature {other[other != 1.0][0]:g}, and the {tag} at "
            f"{teacher.url} scores at temperature 1 only: have all be sampled so, or name the teacher's "
            f"directory with {teacher_settings(tag)}.path"
        )
    if teacher.kl == "sampled" and sample.kept is not None and sample.kept.counts[_trained(sample)].any():
        raise ConfigError(
            f"{sample.name} has tokens that were drawn from kept sets, and the {tag} at {teacher.url} scores "
            "with the whole vocabulary only: set sampling.keep_masks=false, or "
            f"{teacher_settings(tag)}.kl=top_k"
        )


def _trained(sample: Sample) -> NDArray[np.intp]:
    return 1 + np.flatnonzero(sample.loss_mask[1:])


async def _logprobs(server: TeacherServer, sample: Sample) -> NDArray[np.float32]:
    found = np.full(len(sample.token_ids), np.nan, np.float32)
    if len(trained := _trained(sample)):
        begin = int(trained[0]) - 1  # the entry there is none

        def read(entries: Entries, _: Tops) -> NDArray[np.float32]:
            return read_logprobs([entries[place - begin] for place in trained])

        found[trained] = await server.scored(_through_trained(sample), read, begin=begin)
    return found


async def _top_tokens(server: TeacherServer, sample: Sample, count: int, vocab_size: int) -> TopTokens:
    top = TopTokens.none(len(sample.token_ids), count)
    if len(trained := _trained(sample)):
        begin, there = int(trained[0]) - 1, min(count, vocab_size)

        def read(_: Entries, tops: Tops) -> TopTokens:
            places = [tops[place - begin] for place in trained]
            ids, logprobs = read_top_tokens(places, count=there, vocab_size=vocab_size)
            return TopTokens(ids, logprobs).widened(count)

        found = await server.scored(_through_trained(sample), read, begin=begin, top_k=there)
        top.token_ids[trained], top.logprobs[trained] = found.token_ids, found.logprobs
    return top


def _through_trained(sample: Sample) -> list[int]:
    """Return the tokens up to the last trained one: no other tells a server anything about these."""
    tokens: list[int] = sample.token_ids[: _trained(sample)[-1] + 1].tolist()
    return tokens
