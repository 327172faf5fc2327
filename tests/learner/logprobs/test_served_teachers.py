"""Teachers behind servers: steps with them are those with the same weights held here; what can go wrong."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from aiohttp import web

from bus.errors import ConfigError, EngineError, RequestRefusedError
from bus.kept_sets import KeptSets
from bus.trajectory import Groups
from learner.config.batch import BatchConfig
from learner.config.frozen_policies import TeacherConfig, refuse_other_sampling
from learner.config.learner import LearnerConfig
from learner.data.top_tokens import NO_TOKEN
from learner.logprobs import teacher_server
from learner.logprobs.served_teachers import ask_teachers, teachers_asked
from learner.logprobs.teacher_answers import read_entries, read_top_tokens
from tests.learner.logprobs.served_model import ServedModel, Spoil
from tests.learner.logprobs.served_steps import groups_of, stepped, teacher
from tests.learner.tiny import VOCAB

pytestmark = pytest.mark.slow

AWAY = "http://127.0.0.1:9"
"""An address at which nobody answers."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are repeated soon."""
    monkeypatch.setattr(teacher_server, "FIRST_WAIT_S", 0.01)


def asked(groups: Groups, *, kl: dict | None = None, **settings: object):
    learner = LearnerConfig(teacher=TeacherConfig(**settings, **(kl or {})))
    return teachers_asked(groups, learner, vocab_size=VOCAB)


@cache
def untaught() -> torch.Tensor:
    """The weights after two steps without a teacher."""
    return stepped(LearnerConfig(batch=BatchConfig(tokens_per_micro_batch=32)))[1]


SAMPLED, REVERSE = {"coef": 0.5}, {"coef": 0.5, "kl": "top_k", "top_k": 5}
KINDS: dict[str, list[dict]] = {
    "sampled": [SAMPLED],
    "top_k": [REVERSE],
    "top_k forward of all tokens": [REVERSE | {"top_k": 64, "direction": "forward"}],
    "two of sources that overlap": [SAMPLED, {"coef": 0.25, "sources": ("odd",)}],
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_a_teacher_behind_a_server_are_those_with_its_directory(kind):
    def learner(**where: object) -> LearnerConfig:
        first, *others = [TeacherConfig(**settings, **where) for settings in KINDS[kind]]
        named = {f"number{n}": other for n, other in enumerate(others)}
        batch = BatchConfig(tokens_per_micro_batch=32)
        return LearnerConfig(teacher=first, teachers=named, batch=batch)

    with ServedModel(teacher()) as server:
        steps, weights, held = stepped(learner(url=server.url))
    expected_steps, expected_weights, _ = stepped(learner(path=Path("a directory")))
    assert held == set()
    np.testing.assert_allclose(steps, expected_steps, rtol=2e-5, atol=2e-6)
    assert (weights - expected_weights).abs().max() < 2e-6
    assert (weights - untaught()).abs().max() > 1e-3  # else the teacher had no part in it


def test_a_server_and_a_directory_teach_together():
    both = {"teacher": TeacherConfig(path=Path("x"), coef=0.5)}
    with ServedModel(teacher()) as server:
        mixed, _, held = stepped(
            LearnerConfig(**both, teachers={"served": TeacherConfig(url=server.url, coef=0.25)})
        )
    alone, _, _ = stepped(LearnerConfig(teacher=TeacherConfig(path=Path("x"), coef=0.75)))
    assert held == {"teacher"}
    np.testing.assert_allclose(mixed, alone, rtol=2e-5, atol=2e-6)


def test_a_request_is_for_the_trained_tokens_and_what_is_before_them():
    [group] = groups_of(1)
    mask = group[0].loss_mask.copy()
    mask[-1] = False
    trajectory = replace(group[0], loss_mask=mask)
    none = replace(group[1], loss_mask=np.zeros_like(group[1].loss_mask))
    with ServedModel(teacher()) as server:
        answers = asked([[trajectory, none]], url=server.url)
    [body] = server.bodies
    first, last = np.flatnonzero(mask)[[0, -1]]
    assert body["input_ids"] == trajectory.token_ids[: last + 1].tolist()
    assert body["logprob_start_len"] == first - 1
    assert body["sampling_params"]["max_new_tokens"] == 0
    found, untaught = answers.logprobs["teacher"]
    ids = torch.from_numpy(trajectory.token_ids).long()
    with torch.inference_mode():
        expected = teacher()(ids[None]).logits[0].double().log_softmax(-1)
    np.testing.assert_allclose(
        found[mask], [expected[t - 1, ids[t]] for t in np.flatnonzero(mask)], atol=1e-5
    )
    assert np.isnan(found[~mask]).all()
    assert np.isnan(untaught).all()


def test_so_many_requests_as_configured_are_on_their_way():
    with ServedModel(teacher(), spoil=wait_for_others(3)) as server:
        asked(groups_of(4), url=server.url, concurrency=3)
    assert (len(server.bodies), server.most_at_once) == (12, 3)


def wait_for_others(count: int) -> Spoil:
    """Answer none of the first requests before all of them are there."""
    there, arrived = asyncio.Event(), []

    async def spoil(number: int, answer: dict) -> dict:
        arrived.append(number)
        if len(arrived) >= count:
            there.set()
        await asyncio.wait_for(there.wait(), 60)
        return answer

    return spoil


def changed(change: Callable[[dict], None]) -> Spoil:
    def spoil(_: int, answer: dict) -> dict:
        change(answer["meta_info"])
        return answer

    return spoil


def first_times(count: int, reply: Callable[[], web.Response | dict]) -> Spoil:
    return lambda number, _: reply() if number <= count else None


def aborted() -> dict:
    end = {"type": "abort", "message": "out of memory"}
    return {"meta_info": {"input_token_logprobs": [], "finish_reason": end}}


@pytest.mark.parametrize(
    "reply",
    [lambda: web.Response(status=503), lambda: web.Response(status=429), aborted],
    ids=[503, 429, "aborted"],
)
def test_an_outage_is_waited_for(reply):
    with ServedModel(teacher(), spoil=first_times(2, reply)) as server:
        answers = asked(groups_of(1), url=server.url, concurrency=1, outage_s=30)
    assert len(server.bodies) == 5
    assert all(np.isfinite(logprobs).any() for logprobs in answers.logprobs["teacher"])


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (first_times(99, lambda: web.Response(status=500, text="CUDA error")), r"status 500: 'CUDA error'"),
        (first_times(99, aborted), "gave the request up: out of memory"),
    ],
)
def test_an_outage_that_lasts_ends_with_the_address_and_the_setting(spoil, complaint):
    with ServedModel(teacher(), spoil=spoil) as server:
        with pytest.raises(EngineError, match=complaint) as raised:
            asked(groups_of(1), url=server.url, outage_s=0.05)
        assert f"the teacher at {server.url}/generate" in str(raised.value)
        assert "learner.teacher.outage_s=0.05" in str(raised.value)


def test_nobody_at_the_address_is_an_outage_of_the_teacher_of_that_name():
    learner = LearnerConfig(teachers={"math": TeacherConfig(url=AWAY, outage_s=0.05)})
    with pytest.raises(EngineError, match=rf"{AWAY}/generate.*correct learner\.teachers\.math\.url"):
        teachers_asked(groups_of(1), learner, vocab_size=VOCAB)


def test_what_is_no_address_is_refused_and_not_waited_for():
    with pytest.raises(ConfigError, match=r"learner\.teacher\.url='http://host:port' is no address"):
        asked(groups_of(1), url="http://host:port", outage_s=600)


def test_a_server_that_hangs_is_given_up():
    async def hang(*_: object) -> None:
        await asyncio.sleep(60)

    with (
        ServedModel(teacher(), spoil=hang) as server,
        pytest.raises(EngineError, match=r"no answer within timeout_s=0\.1"),
    ):
        asked(groups_of(1), url=server.url, timeout_s=0.1, outage_s=0.05)


WRONG = {
    "fewer tokens": (lambda meta: meta["input_token_logprobs"].pop(), r"came back with \d+ log-probs"),
    "NaN": (lambda meta: meta["input_token_logprobs"][-1].__setitem__(0, None), "is nan: are the server"),
    "infinity": (
        lambda meta: meta["input_token_logprobs"][-1].__setitem__(0, -np.inf), "is -inf: are the server"
    ),
    "a probability above 1": (
        lambda meta: meta["input_token_logprobs"][-1].__setitem__(0, 0.5), "is 0.5: are the server"
    ),
    "other tokens": (
        lambda meta: meta["input_token_logprobs"][1].__setitem__(1, 1 + VOCAB), f"{1 + VOCAB} instead of"
    ),
    "no log-probs": (lambda meta: meta.pop("input_token_logprobs"), "input_token_logprobs: Field required"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_an_answer_that_cannot_be_right_ends_the_step_at_once(wrong):
    change, complaint = WRONG[wrong]
    with ServedModel(teacher(), spoil=changed(change)) as server:
        with pytest.raises(EngineError, match=complaint) as raised:
            asked([groups_of(1)[0][:1]], url=server.url)
        assert server.url in str(raised.value)
    assert len(server.bodies) == 1


WRONG_TOPS = {
    "none": (lambda meta: meta.pop("input_top_logprobs"), r"and 0 sets of the likeliest"),
    "fewer": (
        lambda meta: meta["input_top_logprobs"][-1].pop(),
        "4 of the likeliest tokens came instead of 5",
    ),
    "NaN": (lambda meta: meta["input_top_logprobs"][-1][2].__setitem__(0, None), "is nan"),
}


@pytest.mark.parametrize("wrong", WRONG_TOPS)
def test_likeliest_tokens_that_cannot_be_right_end_the_step(wrong):
    change, complaint = WRONG_TOPS[wrong]
    with (
        ServedModel(teacher(), spoil=changed(change)) as server,
        pytest.raises(EngineError, match=complaint) as raised,
    ):
        asked(groups_of(1), url=server.url, kl=REVERSE)
    assert server.url in str(raised.value)


async def test_a_server_that_was_started_again_with_another_model_is_refused():
    groups, known = groups_of(1), {}
    for name in ("a-large-model", "a-small-model"):
        with ServedModel(teacher(), model_path=name) as server:
            learner = LearnerConfig(teacher=TeacherConfig(url=server.url, **SAMPLED))
            asking = ask_teachers(groups, learner, vocab_size=VOCAB, served=known)
            if name == "a-large-model":
                assert (await asking).logprobs
                continue
            with pytest.raises(EngineError, match="is a-small-model now, and was a-large-model"):
                await asking
    assert not server.bodies


def test_likeliest_tokens_of_no_distribution_are_refused():
    tops = [[(np.log(p), token, None) for token, p in enumerate(share)] for share in ([0.5, 0.4], [0.9, 0.8])]
    assert read_top_tokens(tops[:1], count=2, vocab_size=10)
    with pytest.raises(EngineError, match=r"a probability of 1\.7 together"):
        read_top_tokens(tops, count=2, vocab_size=10)


def test_a_refused_request_is_not_repeated():
    trajectory = groups_of(1)[0][0]
    groups = [[replace(trajectory, token_ids=trajectory.token_ids + VOCAB)]]
    complaint = r"refused the request with status 400.*vocab size \(58\)"
    with ServedModel(teacher()) as server, pytest.raises(RequestRefusedError, match=complaint):
        asked(groups, url=server.url)
    assert len(server.bodies) == 1
    end = {"type": "abort", "status_code": 400, "message": "too long"}
    spoil = changed(lambda meta: meta.update(finish_reason=end))
    with (
        ServedModel(teacher(), spoil=spoil) as server,
        pytest.raises(RequestRefusedError, match=rf"{server.url}/generate: .*: too long"),
    ):
        asked([[trajectory]], url=server.url)
    assert len(server.bodies) == 1


def test_tokens_that_the_policy_lacks_count_among_the_others():
    tops = [[(np.log(p), token, None) for p, token in ((0.5, 3), (0.25, 99), (0.125, 7))]]
    ids, logprobs = read_top_tokens(tops, count=3, vocab_size=10)
    assert ids.tolist() == [[3, NO_TOKEN, 7]]
    np.testing.assert_allclose(np.exp(logprobs), [[0.5, 0, 0.125, 0.375]], rtol=1e-6)
    everything = [[(np.log(0.75), 1, None), (np.log(0.25), 0, None)]]
    assert read_top_tokens(everything, count=2, vocab_size=2)[1][0, -1] == -np.inf
    nearly = read_top_tokens([[(-1e-9, 1, None)]], count=1, vocab_size=9)[1]
    np.testing.assert_allclose(np.exp(nearly[0, -1]), 1e-7, rtol=1e-6)  # not -inf, which would not count


@pytest.mark.parametrize("ids", [(3, 7, 3), (3, -7, 2)])
def test_a_likeliest_token_that_comes_twice_or_is_none_is_refused(ids: tuple[int, ...]):
    good = [(-1.0, token, None) for token in (3, 7, 2)]
    tops = [good, [(-2.0, token, None) for token in ids]]
    with pytest.raises(
        EngineError, match=rf"some come twice or are negative: \[{ids[0]}, {ids[1]}, {ids[2]}\]"
    ):
        read_top_tokens(tops, count=3, vocab_size=10)


def test_a_teacher_that_answers_0_for_any_token_is_refused():
    def raw(*told: int) -> bytes:
        return json.dumps(
            {"meta_info": {"input_token_logprobs": [(-1.0, one, None) for one in told]}}
        ).encode()

    entries, _ = read_entries(raw(3, 0, 7, 0), [3, 57, 7, 57], with_tops=False)  # 57 is the last of 58
    assert len(entries) == 4
    with pytest.raises(EngineError, match="of other tokens than those sent: 0 instead of 3"):
        read_entries(raw(0, 0, 0), [3, 57, 7], with_tops=False)


def test_tokens_of_another_distribution_are_refused():
    [group] = groups_of(1)
    warm = [replace(t, turns=tuple(turn._replace(temperature=0.8) for turn in t.turns)) for t in group]
    with pytest.raises(
        ConfigError, match=r"sampled at temperature 0\.8, and the teacher at .* temperature 1 only"
    ):
        asked([warm], url=AWAY)
    sets = KeptSets.of([np.array([token], np.int32) for token in group[0].token_ids])
    kept = replace(group[0], kept_counts=sets.counts.tobytes(), kept_tokens=sets.token_ids.tobytes())
    with pytest.raises(ConfigError, match=r"drawn from kept sets.*kl=top_k"):
        asked([[kept]], url=AWAY)
    with ServedModel(teacher()) as server:  # whole distributions are compared whatever was kept
        asked([[kept]], url=server.url, kl=REVERSE)


@pytest.mark.parametrize(
    ("sampling", "complaint"),
    [
        (
            {"temperature": 0.7, "keep_masks": False},
            r"learner\.teachers\.math\.url needs sampling\.temperature=1",
        ),
        (
            {"temperature": 1.0, "keep_masks": True},
            r"sampling\.keep_masks=true: SGLang scores with the whole",
        ),
    ],
)
def test_sampling_from_another_distribution_is_refused_before_the_run(sampling, complaint):
    learner = LearnerConfig(teachers={"math": TeacherConfig(url=AWAY)})
    with pytest.raises(ConfigError, match=complaint):
        refuse_other_sampling(learner.served_teachers, **sampling)
    refuse_other_sampling(learner.served_teachers, temperature=1.0, keep_masks=False)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"url": AWAY, "path": "x"}, "path=x and url=http.* are two teachers"),
        ({"url": "host:30000"}, "is no URL: write it as http://host:port"),
        ({"path": "x", "concurrency": 4}, "concurrency=4 has no effect without url"),
        ({"outage_s": 1.0}, "outage_s=1.0 has no effect without url"),
        ({"kl": "top_k", "top_k": 4}, "kl=top_k needs a teacher: set path or url"),
        ({"sources": ("a",)}, "needs a teacher: set path or url"),
    ],
)
def test_settings_of_a_served_teacher_that_do_not_go_together_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        TeacherConfig(**settings)


async def test_nobody_is_asked_where_all_teachers_are_held():
    learner = LearnerConfig(teacher=TeacherConfig(path=Path("x")))
    answers = await ask_teachers(groups_of(1), learner, vocab_size=VOCAB)
    assert (answers.logprobs, answers.top_tokens) == ({}, {})
