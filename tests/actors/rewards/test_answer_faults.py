"""A verifier that an answer breaks scores it lowest; one that is broken scores nothing."""

import errno
import signal
import threading

import pytest

from actors.episodes.errors import LATEST, LatestUses, is_of_host
from actors.rewards.answer_faults import verified
from actors.rewards.base import AnswerFaultError, RewardError, Scored
from actors.rewards.builtin.verifier_processes import VerifierProcesses
from actors.rewards.scoring.scorers import GroupScorer, Scorer
from actors.settings.rewards import RewardConfig
from tests.actors.rewards import failing_verifiers
from tests.actors.rewards.answers import answer


@pytest.fixture
async def verify():
    """Verify a text in a process, by the rule."""
    processes = VerifierProcesses(
        processes=1, timeout_s=1.0, module=failing_verifiers.__name__, prepare=failing_verifiers.prepare
    )

    async def found(text, control="right"):
        async def once(text):
            return await processes.call(failing_verifiers.verify, text)

        return await verified(once, text, control=control, lowest=-1.0, where="task t: it")

    yield found
    await processes.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["raise x", "hang", "grow", "segfault", f"signal {int(signal.SIGABRT)}", "exit"]
)
async def test_an_answer_that_breaks_the_verifier_has_the_lowest_reward(verify, text):
    with pytest.raises(
        AnswerFaultError, match=r"task t: it failed by .* and works on another answer"
    ) as found:
        await verify(text)
    assert found.value.reward == -1.0
    assert await verify("fine") == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("text", "control"), [("raise x", "raise y"), ("hang", "hang"), ("raise x", "hang")])
async def test_a_verifier_that_fails_on_a_right_answer_too_is_broken(verify, text, control):
    with pytest.raises(RewardError, match="the verifier, the label or the host is broken") as found:
        await verify(text, control)
    assert not isinstance(found.value, AnswerFaultError)


@pytest.mark.slow
async def test_a_verification_that_the_host_kills_says_nothing_about_the_answer(verify):
    with pytest.raises(RewardError, match="killed by signal 9, as a host does") as found:
        await verify(f"signal {int(signal.SIGKILL)}")
    assert not isinstance(found.value, AnswerFaultError)


@pytest.mark.parametrize("error", [TimeoutError, MemoryError])
async def test_a_failure_of_load_is_blamed_on_the_answer_only_where_it_comes_again(error):
    calls = []

    async def once(text):
        calls.append(text)
        if calls == ["slow"]:
            raise error
        return 1.0

    assert await verified(once, "slow", control="right", lowest=0.0, where="it") == 1.0
    assert calls == ["slow", "right", "slow"]


async def test_a_reward_of_ones_own_says_that_the_answer_is_to_blame():
    def score(given):
        if given.text == "broken":
            raise AnswerFaultError("it is no JSON", reward=-2.0)
        return 1.0

    scorer = Scorer("mine", timeout_s=60, reward=score)
    assert await scorer.scored(answer("broken")) == Scored(-2.0, fault="it is no JSON")
    assert await scorer.scored(answer("fine")) == Scored(1.0)
    bad = Scorer(
        "mine",
        timeout_s=5,
        reward=lambda _: (_ for _ in ()).throw(AnswerFaultError("x", reward=float("nan"))),
    )
    with pytest.raises(RewardError, match="nan"):
        await bad.scored(answer("any"))


def test_what_no_longer_works_is_not_blamed_on_the_policy():
    uses = LatestUses()
    assert not uses.work
    uses.note(worked=True)
    for _ in range(LATEST - 1):
        uses.note(worked=False)
    assert uses.work
    uses.note(worked=False)
    assert not uses.work


def own(answer):
    """A reward of somebody's own, which does not foresee all that a policy may write."""
    if answer.text == "hangs":
        threading.Event().wait(0.5)
    return {"number": float(answer.text)} if answer.text != "nothing" else None


@pytest.mark.parametrize(("text", "said"), [("words", "ValueError"), ("nothing", "None"), ("nan", "nan")])
async def test_a_reward_of_ones_own_that_fails_on_an_answer_alone_gives_the_lowest(text, said):
    scorer = Scorer("mine", timeout_s=60, reward=own, lowest=-1.0)
    found = await scorer.scored(answer(text, "42"))
    assert (found.reward, said in found.fault) == (-1.0, True)
    assert await scorer.score(answer("3", "words")) == 3.0
    with pytest.raises(RewardError, match=said):  # the label is no number either: the reward is wrong
        await scorer.scored(answer(text, "words"))
    with pytest.raises(RewardError, match=said):  # the settings leave such answers out
        await Scorer("mine", timeout_s=60, reward=own).scored(answer(text, "42"))


async def test_a_reward_of_ones_own_that_hangs_on_an_answer_alone_gives_the_lowest():
    scorer = Scorer("mine", timeout_s=0.1, reward=own, lowest=-1.0)
    found = await scorer.scored(answer("hangs", "42"))
    assert (found.reward, "no result within 0.1 s" in found.fault) == (-1.0, True)


async def test_a_reward_that_fails_once_is_asked_again_and_one_that_says_why_is_not():
    calls = []

    def flaky(answer):
        calls.append(answer.text)
        if len(calls) == 1:
            raise ConnectionError
        return 1.0

    assert await Scorer("mine", timeout_s=60, reward=flaky, lowest=-1.0).score(answer("a", "b")) == 1.0
    assert calls == ["a", "b", "a"]

    def away(answer):
        calls.append(answer.text)
        raise RewardError("the database is away")

    with pytest.raises(RewardError, match="the database is away"):
        await Scorer("mine", timeout_s=60, reward=away, lowest=-1.0).score(answer("c", "d"))
    assert calls[3:] == ["c"]


async def test_a_reward_whose_server_is_away_blames_no_answer_though_it_knows_the_label_by_itself():
    away = False

    def embeds(answer):
        if answer.text == answer.label:
            return 1.0
        if away or answer.text == "odd":
            raise ConnectionRefusedError
        return 0.5

    scorer = Scorer("mine", timeout_s=60, reward=embeds, lowest=0.0)
    with pytest.raises(RewardError, match="ConnectionRefusedError"):  # nothing says that there is a server
        await scorer.scored(answer("odd", "right"))
    assert await scorer.score(answer("nearly", "right")) == 0.5
    assert (await scorer.scored(answer("odd", "right"))).fault
    away = True
    with pytest.raises(RewardError, match="ConnectionRefusedError"):
        await scorer.scored(answer("as near", "right"))


async def test_an_answer_that_cannot_be_scored_is_worth_no_more_than_a_wrong_one():
    def distance(answer):
        return -abs(float(answer.text) - 3)

    scorer = Scorer("mine", timeout_s=60, reward=distance, lowest=0.0)
    assert await scorer.score(answer("30", "3")) == -27.0
    assert await scorer.score(answer("words", "3")) == -27.0


def raised_of(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "of_host"),
    [
        (ConnectionResetError(), True),
        (OSError(errno.ENOSPC, "no space"), True),
        (raised_of(RuntimeError("no answer"), TimeoutError()), True),
        (ExceptionGroup("two agents", [ValueError(), ExceptionGroup("one", [MemoryError()])]), True),
        (FileNotFoundError(), False),
        (OSError(errno.ENAMETOOLONG, "a name that the policy wrote"), False),
        (raised_of(RuntimeError("no number"), ValueError()), False),
    ],
)
def test_errors_of_a_server_that_is_away_or_a_host_without_room_are_known(error, of_host):
    assert is_of_host(error) == of_host


@pytest.mark.parametrize(
    ("settings", "lowest"),
    [
        ({}, 0.0),
        ({"unfinished_reward": -2.0}, -2.0),
        ({"reward": "dapo"}, -1.0),
        ({"rewards": ["dapo"], "unfinished_reward": -2.0}, -2.0),
        ({"reward": "dapo", "unfinished_reward": None}, None),
    ],
)
def test_the_lowest_reward_is_at_most_that_of_a_built_in_reward(settings, lowest):
    assert RewardConfig.model_validate(settings).lowest == lowest


ODD = [
    "",
    "\u0000",
    "[" * 3000,
    "9" * 5000,
    "{",
    "\\boxed{",
    "\\boxed{\\frac{}{}}",
    "-",
    ".",
    "\ud83d\ude00",
    "1e999999999",
    "a=b=c",
]


@pytest.mark.parametrize(
    ("name", "label", "metadata"),
    [
        ("exact", "72", {}),
        ("contains", "72", {}),
        ("last_number", "18 + 54 = 72\n#### 72", {}),
        ("final_answer", "x = 72", {}),
        ("dapo", "72", {}),
        ("gpqa", "B", {"choices": ["one", "two", "three"]}),
        ("f1", "seventy two", {}),
        ("exact_match", "seventy two", {}),
        ("instructions", None, {"instruction_id_list": ["detectable_format:json_format"]}),
    ],
)
async def test_no_words_make_a_quick_reward_fail(name, label, metadata):
    scorer = Scorer.from_config(name, RewardConfig(reward=name))
    for text in ODD:
        for end in ("stop", "length"):
            found = await scorer.scored(answer(text, label, metadata=metadata, finish_reason=end))
            assert isinstance(found, Scored)


@pytest.mark.parametrize(
    ("name", "label", "metadata"),
    [
        ("exact", None, {}),
        ("contains", None, {}),
        ("last_number", "seventy", {}),
        ("last_number", "#### many", {}),
        ("last_number", "nan", {}),
        ("final_answer", None, {}),
        ("dapo", "half", {}),
        ("gpqa", "Z", {}),
        ("f1", None, {}),
        ("exact_match", None, {"answers": []}),
        ("math", "", {}),
        ("deepscaler", None, {}),
        ("instructions", None, {}),
        ("instructions", None, {"instruction_id_list": ["no:such"]}),
        ("instructions", None, {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": 3}]}),
    ],
)
@pytest.mark.parametrize("text", ["", "72", "no number"])
async def test_no_answer_is_scored_before_the_label_is_read(name, label, metadata, text):
    scorer = Scorer.from_config(name, RewardConfig(reward=name))
    for end in ("stop", "length"):
        with pytest.raises(RewardError):
            await scorer.scored(answer(text, label, metadata=metadata, finish_reason=end))


@pytest.mark.parametrize(("text", "reward"), [("so it is 72", 1.0), ("so it is 54", 0.0), ("none", 0.0)])
async def test_a_label_of_gsm8k_is_read_as_its_last_number(text, reward):
    label = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72.\n#### 72"
    assert await Scorer("last_number", timeout_s=60).score(answer(text, label)) == reward
    assert await Scorer("dapo", timeout_s=60).score(answer(f"Answer: {text[-2:]}", label)) == 2 * reward - 1
    math = Scorer.from_config("math", RewardConfig(reward="math"))
    assert (
        await math.score(answer(rf"\boxed{{{text[-2:]}}}" if reward or "54" in text else text, label))
        == reward
    )
    await math.close()


def longest_number(answers):
    """A reward of a group that does not foresee all that a policy may write."""
    most = max(float(one.text) for one in answers)
    return [float(one.text) / most for one in answers]


async def test_answers_that_make_a_group_reward_fail_have_the_lowest_and_the_others_their_own():
    def group_of(*texts, label="8"):
        return [answer(text, label) for text in texts]

    scorer = GroupScorer("mine", timeout_s=60, reward=longest_number, lowest=-1.0)
    with pytest.raises(RewardError, match="could not convert"):  # nothing says that it ever works
        await scorer.scored(group_of("words", "more words"))
    first, second, third = await scorer.scored(group_of("4", "words", "2"))
    assert (first, third) == (Scored(0.5), Scored(0.25))  # of a group with the label in the other's place
    assert second.reward == -1.0
    assert "could not convert string to float: 'words'" in second.fault
    assert [one.reward for one in await scorer.scored(group_of("words", "more words"))] == [-1.0, -1.0]
    with pytest.raises(RewardError, match="could not convert"):  # the label is no number either
        await scorer.scored(group_of("4", "words", label="a label"))
    with pytest.raises(RewardError, match="could not convert"):  # the settings leave such answers out
        await GroupScorer("mine", timeout_s=60, reward=longest_number).scored(group_of("4", "words"))
    configured = RewardConfig(group_reward=f"{__name__}:longest_number", unfinished_reward=-3.0)
    assert (await GroupScorer.from_config(configured).scored(group_of("4", "words")))[1].reward == -3.0


async def test_a_group_reward_of_the_host_or_of_all_answers_together_blames_none():
    def away(answers):
        raise ConnectionError("no server")

    def by_sum(answers):
        if sum(float(one.text) for one in answers) > 20:
            raise ValueError("too much")
        return [0.0 for _ in answers]

    def itself(answers):
        raise RewardError("the database is away")

    def away_later(answers):
        texts = {one.text for one in answers}
        if {"11", "12"} <= texts:
            raise ValueError("both")
        if "11" in texts:
            raise ConnectionError("no server")
        return [0.0 for _ in answers]

    for reward, said in (
        (away, "no server"), (by_sum, "too much"), (itself, "the database is away"), (away_later, "both"),
    ):  # fmt: skip
        scorer = GroupScorer("mine", timeout_s=60, reward=reward, lowest=-1.0)
        with pytest.raises(RewardError, match=said):
            await scorer.scored([answer("11", "1"), answer("12", "1")])


@pytest.mark.parametrize("error", [MemoryError(), ConnectionError("refused"), ValueError("a page of errors")])
async def test_what_an_answer_does_to_the_host_is_told_from_a_server_that_is_away(error):
    away, asked = False, 0

    def by_server(answers):
        nonlocal asked
        asked += 1
        if any("http" in one.text or (away and one.text != one.label) for one in answers):
            raise error
        return [0.0 for _ in answers]

    scorer = GroupScorer("mine", timeout_s=60, reward=by_server, lowest=-1.0)
    assert len(await scorer.scored([answer("11", "1"), answer("12", "1")])) == 2
    tricky = [answer("11", "1"), answer("http://nobody", "1")]
    assert [one.reward for one in await scorer.scored(tricky)] == [0.0, -1.0]
    assert [one.reward for one in await scorer.scored(tricky[1:])] == [-1.0]
    away, asked = True, 0
    with pytest.raises(RewardError):  # as it does on the newest group that it has scored
        await scorer.scored([answer("11", "1"), *[answer("12", "1")] * 14, tricky[1]])
    assert asked == 3  # a server in trouble is not asked for each of them


async def test_a_verifier_that_fails_otherwise_the_second_time_is_judged_too():
    errors = iter([TimeoutError(), ValueError("words")])

    async def once(text):
        if text == "slow":
            raise next(errors)
        return 1.0

    with pytest.raises(AnswerFaultError, match="ValueError: words"):
        await verified(once, "slow", control="right", lowest=0.0, where="it")
