"""Built-in rewards, rewards of the user's own, and how they fail."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.episodes.task import Answer, Task
from actors.rewards.base import RewardError, Scored
from actors.rewards.builtin.registry import REWARDS, load_reward
from actors.rewards.scoring.answer_scoring import answer_to
from actors.rewards.scoring.scorers import GroupScorer, Scorer
from bus.errors import ConfigError
from bus.messages import Prompt


def answer(text="", label="42", *, finish_reason="stop", task_id="t"):
    return Answer(task_id=task_id, messages=(), text=text, finish_reason=finish_reason, label=label)


@pytest.mark.parametrize(
    ("name", "text", "label", "finish_reason", "reward"),
    [
        ("exact", " 42 ", "42", "stop", 1.0),
        ("exact", "42", "42", "length", 0.0),
        ("exact", "so 42", "42", "stop", 0.0),
        ("last_number", "1 and then 1,200.50.", "1200.5", "stop", 1.0),
        ("last_number", "it is -7", "-7", "length", 1.0),
        ("last_number", "42, no: 43", "42", "stop", 0.0),
        ("last_number", "none", "42", "stop", 0.0),
        ("final_answer", "92011 =042", "042", "stop", 1.0),
        ("final_answer", "92011 =042", "31004 =042", "stop", 1.0),
        ("final_answer", "92011 =042", "42", "stop", 0.0),
        ("final_answer", "=042", "042", "length", 0.0),
        ("contains", "it is 42!", "42", "length", 1.0),
        ("contains", "it is 4 2", "42", "stop", 0.0),
    ],
)
def test_builtin_rewards(name, text, label, finish_reason, reward):
    assert REWARDS[name](answer(text, label, finish_reason=finish_reason)) == reward


@pytest.mark.parametrize(
    "name", sorted(REWARDS.keys() - {"instructions", "length", "random", "sandbox_check"})
)
async def test_a_missing_label_is_an_error_not_a_zero(name):
    with pytest.raises(RewardError, match="task t has no label"):
        await Scorer(name, timeout_s=60).score(answer("42", None))


async def test_a_label_that_is_no_number_is_an_error():
    with pytest.raises(RewardError, match="the label 'many' is not a number"):
        await Scorer("last_number", timeout_s=60).score(answer("42", "many"))


def test_a_random_reward_is_uniform_and_the_same_whenever_its_rollout_is_scored():
    names = [f"g{lease:08d}.{sample}" for lease in range(500) for sample in range(8)]
    found = [REWARDS["random"](answer("42", task_id=name)) for name in names]
    assert found == [REWARDS["random"](answer("other", None, task_id=name)) for name in names]
    counts, _ = np.histogram(found, bins=10, range=(0, 1))
    assert all(abs(count - 400) < 100 for count in counts)  # 5 standard deviations
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.08


def test_a_reward_of_length_counts_tokens_and_characters_where_these_are_not_known():
    short, long = answer("42"), replace(answer("42"), token_count=16)
    assert [REWARDS["length"](one) for one in (short, long, answer())] == [16 / 18, 0.5, 1.0]


def test_an_unknown_name_names_the_nearest_and_all():
    with pytest.raises(
        ConfigError, match=r"no reward named 'last_numbr': did you mean 'last_number'\? .*contains"
    ):
        load_reward("last_numbr")


@pytest.fixture
def own_rewards(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "NUMBER = 3\ndef shortness(answer):\n    return 1 / len(answer.text)\n"
    )
    (tmp_path / "my_broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", __import__("sys").path.copy())


@pytest.mark.usefixtures("own_rewards")
async def test_a_reward_of_ones_own_is_imported_from_the_working_directory():
    assert await Scorer("my_rewards:shortness", timeout_s=60).score(answer("1234")) == 0.25


@pytest.mark.usefixtures("own_rewards")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_missing:reward", "start in the directory that holds 'my_missing', or install it"),
        ("my_broken:reward", "importing 'my_broken' failed: ZeroDivisionError"),
        ("my_rewards:shortnes", "does not exist: did you mean 'shortness'"),
        ("my_rewards:NUMBER", "is not callable"),
        (":reward", "importing '' failed"),
    ],
)
def test_rewards_that_cannot_be_loaded_are_config_errors(name, words):
    with pytest.raises(ConfigError, match=words):
        load_reward(name)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 1e39, None, "1.0", True + 0j, Scored(1.0, ["a"])]
)
async def test_a_reward_must_be_a_finite_number(value):
    scorer = Scorer("mine", timeout_s=60, reward=lambda _: value)
    with pytest.raises(RewardError, match="reward mine on task t returned"):
        await scorer.score(answer())


async def test_a_reward_that_raises_fails_its_own_rollout_only():
    def picky(given):
        if given.text == "bad":
            raise KeyError("bad")
        return 1

    scorer = Scorer("picky", timeout_s=60, reward=picky)
    outcomes = await asyncio.gather(
        *(scorer.score(answer(text)) for text in ("good", "bad", "good")), return_exceptions=True
    )
    assert outcomes[0] == outcomes[2] == 1.0
    assert isinstance(outcomes[1], RewardError)
    assert str(outcomes[1]) == "reward picky on task t raised KeyError('bad')"


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor([0.5])[0]])
async def test_a_number_of_numpy_or_torch_is_a_reward(value):
    assert await Scorer("mine", timeout_s=60, reward=lambda _: value).score(answer()) == 0.5


async def test_plain_rewards_run_at_the_same_time_outside_the_event_loop():
    all_in = threading.Barrier(4, timeout=60)

    def reward(_):
        assert threading.current_thread() is not threading.main_thread()
        all_in.wait()  # breaks unless four calls are in it at the same time
        return 1.0

    scorer = Scorer("mine", timeout_s=60, threads=4, reward=reward)
    assert await asyncio.gather(*(scorer.score(answer()) for _ in range(8))) == [1.0] * 8


async def test_a_plain_reward_with_one_thread_is_called_by_one_at_a_time():
    calling, most = [], []

    def reward(_):
        calling.append(None)
        most.append(len(calling))
        calling.pop()
        return 1.0

    scorer = Scorer("mine", timeout_s=60, threads=1, reward=reward)
    assert await asyncio.gather(*(scorer.score(answer()) for _ in range(100))) == [1.0] * 100
    assert max(most) == 1


async def test_a_reward_that_hangs_fails_alone_and_the_next_go_on():
    release = threading.Event()

    def reward(given):
        return 1.0 if given.text != "hang" else release.wait(60) and 0.0

    scorer = Scorer("mine", timeout_s=1.5, reward=reward)
    texts = ("a", "hang", "b", "c")
    outcomes = await asyncio.gather(*(scorer.score(answer(text)) for text in texts), return_exceptions=True)
    release.set()
    assert [outcomes[0], *outcomes[2:]] == [1.0, 1.0, 1.0]
    assert isinstance(outcomes[1], RewardError)
    assert "no result within 1.5 s" in str(outcomes[1])


async def test_async_rewards_are_awaited_and_time_out():
    async def judge(given):
        if given.text == "hang":
            await asyncio.Event().wait()
        return 0.5

    scorer = Scorer("judge", timeout_s=1.5, reward=judge)
    assert await scorer.score(answer("a")) == 0.5
    with pytest.raises(RewardError, match="no result within"):
        await scorer.score(answer("hang"))


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_time_limit_of_a_rewards_own_is_told_as_what_it_raised(is_async):
    def times_out(given):
        raise TimeoutError("its server is away")

    async def awaits(given):
        times_out(given)

    scorer = Scorer("mine", timeout_s=60, reward=awaits if is_async else times_out)
    with pytest.raises(RewardError, match=r"raised TimeoutError\('its server is away'\)"):
        await scorer.score(answer("a"))


async def test_an_object_may_be_an_async_reward():
    class Judge:
        async def __call__(self, given):
            return len(given.text)

    assert await Scorer("judge", timeout_s=60, reward=Judge()).score(answer("abc")) == 3.0


async def test_a_reward_that_changes_what_it_is_given_changes_nothing_for_others():
    def changing(given):
        found = given.metadata.pop("tests")
        found.append("x")
        given.messages[0]["content"] += " Think."
        return len(found) + len(given.messages[0]["content"])

    prompt = Prompt(content=[{"role": "user", "content": "hi"}], metadata={"tests": ["a"]})
    tasks = [Task.of(prompt, f"g.{n}", sample=n) for n in range(2)]
    answers = [answer_to(task, "a", "stop", token_count=1) for task in tasks]
    scorer = Scorer("mine", timeout_s=60, reward=changing)
    assert [await scorer.score(one) for one in answers] == [11.0, 11.0]
    group = GroupScorer("mine", timeout_s=60, reward=lambda given: [changing(one) for one in given])
    assert [scored.reward for scored in await group.scored(answers)] == [11.0, 11.0]
    assert (prompt.metadata, prompt.content[0]["content"]) == ({"tests": ["a"]}, "hi")


def exits(given):
    raise SystemExit(2)  # as argparse does


async def exits_later(given):
    raise SystemExit(2)


async def cancels_itself(given):
    raise asyncio.CancelledError("mine")


@pytest.mark.parametrize("reward", [exits, exits_later, cancels_itself])
async def test_a_reward_that_exits_or_cancels_itself_is_told_at_once_and_ends_no_process(reward):
    scorer = Scorer("mine", timeout_s=3600, reward=reward)
    async with asyncio.timeout(60):
        with pytest.raises(RewardError, match=r"reward mine on task t raised .*(SystemExit|CancelledError)"):
            await asyncio.create_task(scorer.score(answer()))
        group = GroupScorer("mine", timeout_s=3600, reward=reward, lowest=0.0)
        with pytest.raises(RewardError, match="group reward mine on 2 answers"):
            await group.scored([answer("a"), answer("b")])
