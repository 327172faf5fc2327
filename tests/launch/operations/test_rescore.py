"""Re-scoring a run's directory, made by hand, without a bus."""

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.policy.chat_format import ChatFormat
from actors.rewards.scoring.rescoring import Rescored, answer_of, rescore
from actors.rewards.scoring.scorers import Scorer
from actors.settings.actors import ActorsConfig
from bus.errors import ConfigError, StorageError
from bus.messages import Prompt
from bus.trajectory import Trajectory
from launch.cli.main import main
from launch.operations.rescore import EnvironmentRewards, Interval, Rescoring, parse_leases, run_rescore
from launch.operations.rescore import _chat as chat_of
from launch.operations.retrain import restore_run
from launch.settings.run_config import resolve
from learner.config.model import ScratchModel
from learner.initial.scratch_model import build_model_directory, character_tokenizer
from storage.client.score_tables import load_scores
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger import Ledger
from storage.prompt_files.dataset import load_prompts
from storage.prompts.data_sets import DataSets
from storage.prompts.order import PromptOrder
from storage.settings.data import PromptKeys
from storage.store.replay import ReplayStore
from tests.factories import make_trajectory
from tests.pictures import image_part, picture, vision_directory

TOKENIZER = character_tokenizer()
CHAT = ChatFormat(TOKENIZER)
PROMPTS = [{"prompt": f"{n} + 1 =", "label": str(n + 1), "metadata": {"n": n}} for n in range(5)]
SIZES = ScratchModel(hidden_size=8, layers=1, heads=1, kv_heads=1, intermediate_size=8, context=64)


def answered(lease_id: int, sample: int, text: str) -> Trajectory:
    """Make a trajectory as an actor records it: a prompt's tokens, then those of the answer."""
    index = PromptOrder(len(PROMPTS), seed=0, shuffle=True).index(lease_id)
    prompt = CHAT.encode_chat(({"role": "user", "content": PROMPTS[index]["prompt"]},))
    answer = [*CHAT.encode(text), TOKENIZER.eos_token_id]
    mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return replace(
        make_trajectory(lease_id, sample, tokens=len(mask)),
        token_ids=np.array([*prompt, *answer], np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.zeros(len(mask), np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        reward=float(sample),
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Four groups of two, one right answer each: leases 0 and 1 in step 1, lease 2 in step 2, 3 in none."""
    made = RunDirectory(tmp_path / "runs", "mine")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    config = resolve({"run": "mine", "data": {"prompts": str(prompts)}})
    made.config.write_text(config.model_dump_json())
    build_model_directory(made.path / "model", SIZES, seed=0)
    order = PromptOrder(len(PROMPTS), seed=0, shuffle=True)
    with closing(Ledger.open(made.ledger)) as ledger:
        data = DataSets(ledger, made.data)
        data.configure(load_prompts(prompts, PromptKeys()), seed=0, shuffle=True, source="the test")
        ledger.issue(5, policy_version=0)
        for lease_id in range(4):
            ledger.store(lease_id)
            with closing(ReplayStore.open(made.replay(lease_id % 2))) as store:
                right = PROMPTS[order.index(lease_id)]["label"]
                store.append([answered(lease_id, 0, "wrong"), answered(lease_id, 1, right)])
        ledger.lease(1, [0, 1])
        ledger.lease(2, [2])
    return made


def rescored(
    run: RunDirectory, reward: str | None = "exact", *, name: str | None = None, model: Path | None = None,
    **interval: object,
) -> Rescoring:  # fmt: skip
    work = run_rescore(
        run.path.parent, "mine", reward, Interval(**interval), asyncio.Event(), name=name, model=model
    )
    return asyncio.run(work)


def test_groups_of_steps_are_scored_as_the_actor_would(run):
    found = rescored(run, from_step=1, to_step=1)
    assert (found.groups, found.trajectories, found.failed) == (2, 4, 0)
    assert found.comparison.changed_fraction == 0  # sample 1 was right, and had reward 1
    assert load_scores(Path(found.table)) == {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 0.0, (1, 1): 1.0}
    assert Path(found.table) == run.path / "scores/exact.jsonl"
    assert rescored(run).groups == 3
    assert set(load_scores(Path(rescored(run, from_step=2, name="two").table))) == {(2, 0), (2, 1)}


def test_an_answer_to_a_picture_is_found_again_in_its_trajectory(tmp_path):
    chat = chat_of(vision_directory(tmp_path / "model"))
    content = [{"role": "user", "content": [image_part(picture()), {"type": "text", "text": "how many?"}]}]
    prompt = Prompt(content=content, label="3")
    tokens, images = chat.prompt(content)
    answer = [*chat.encode("3"), TOKENIZER.eos_token_id]
    mask = np.arange(len(tokens) + len(answer)) >= len(tokens)
    trajectory = replace(
        make_trajectory(0, 0, tokens=len(mask)),
        token_ids=np.array([*tokens, *answer], np.int32), loss_mask=mask, images=images,
    )  # fmt: skip
    assert answer_of(trajectory, prompt, chat).text == "3"


def test_own_reward_gets_all_that_the_actors_gave_it(run, tmp_path, monkeypatch):
    (tmp_path / "late_rewards_mine.py").write_text(
        "from actors.rewards.base import LATER\n"
        "def fn(answer):\n"
        "    assert answer.messages[0]['content'] == f\"{answer.metadata['n']} + 1 =\"\n"
        "    assert answer.finish_reason == 'stop' and answer.token_count == len(answer.text) + 1\n"
        "    assert answer.task_id.startswith('g0000000')\n"
        "    if answer.text == 'wrong' and answer.task_id == 'g00000001.0': return LATER\n"
        "    return -2.0 if answer.text == answer.label else 3.0\n"
    )
    monkeypatch.chdir(tmp_path)
    found = rescored(run, "late_rewards_mine:fn")
    assert (found.trajectories, found.failed) == (5, 1)
    assert "g00000001.0: its new reward comes later" in found.failures[0]
    assert found.comparison.rank_correlation == pytest.approx(-1)
    assert "was 1: 3, now -2 on average" in str(found)
    assert list(found.to_json()["by_old"]) == [
        {"old": "0", "trajectories": 2, "mean_new": 3.0}, {"old": "1", "trajectories": 3, "mean_new": -2.0}
    ]  # fmt: skip


def test_leases_may_be_named_whether_trained_on_or_not(run):
    found = rescored(run, leases=parse_leases("2-9"))
    assert (found.groups, found.groups_not_complete) == (2, 6)
    with pytest.raises(ConfigError, match="none of the leases 7 to 9 is complete in store; 4 groups"):
        rescored(run, leases=parse_leases("7-9"))
    for text in ("7", "9-7", "a-b", "-3"):
        with pytest.raises(ConfigError, match="write the first and the last, like 0-255"):
            parse_leases(text)


def test_run_in_use_can_be_scored(run):
    with closing(Ledger.open(run.ledger)), closing(ReplayStore.open(run.replay(0))):
        assert rescored(run).groups == 3


def test_what_cannot_be_scored_is_a_clear_error(run, tmp_path):
    with pytest.raises(ConfigError, match="has no groups of steps 3 to 9: it trained steps 1 to 2"):
        rescored(run, from_step=3, to_step=9)
    with pytest.raises(ConfigError, match="no reward named 'exakt'"):
        rescored(run, "exakt")
    with pytest.raises(ConfigError, match="there is no run 'other'"):
        asyncio.run(run_rescore(tmp_path / "runs", "other", "exact", Interval(), asyncio.Event()))
    with pytest.raises(ConfigError, match="is no model directory: name one with the run's"):
        rescored(run, model=tmp_path)
    assert not (run.path / "scores").exists()


def test_prompts_are_those_of_the_leases_whatever_became_of_the_file(run, tmp_path):
    before = rescored(run)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "another", "label": "1"}\n' * 5)
    assert rescored(run) == before
    [copy] = run.data.glob("prompts-*.jsonl")
    copy.write_text('{"prompt": "another", "label": "1"}\n' * 5)
    with pytest.raises(StorageError, match="is not the copy of the test that it was"):
        rescored(run)


def test_retired_groups_are_named(run):
    with closing(ReplayStore.open(run.replay(0))) as store:
        store.retire(store.entries[0], None)
    with pytest.raises(StorageError, match="was retired to save space: restore its segment from the archive"):
        rescored(run)


@pytest.mark.slow
def test_groups_that_went_to_s3_are_scored_again_once_they_are_restored(run, object_store):
    before = rescored(run)
    with closing(ReplayStore.open(run.replay(0))) as store:
        store.retire(store.entries[0], "s3://bucket/replay/mine")
    with pytest.raises(StorageError, match="restore its segment from the archive"):
        rescored(run)
    assert [Path(path).name for path in restore_run(run, "s3://bucket/replay")] == ["segment_00000000"]
    assert rescored(run) == before


def test_command_prints_one_json_object(run, capsys):
    directory = str(run.path.parent)
    with pytest.raises(SystemExit) as ended:
        main(["rescore", "--run", "mine", "--reward", "exact", "--directory", directory, "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["mean_new"] == 0.5
    with pytest.raises(SystemExit) as ended:
        main(["rescore", "--reward", "exact", "--leases", "0-1", "--to-step", "2"])
    assert ended.value.code == 2
    assert "--leases and steps exclude each other" in capsys.readouterr().err


SEVERAL = ActorsConfig.model_validate({
    "environment": {"type": "single_turn", "reward": "exact"},
    "environments": [
        {"name": "loose", "environment": {"type": "single_turn", "reward": "contains"}},
        {"name": "mine", "environment": {"type": "plugin", "environment": "my_pkg:Environment"}},
        {"name": "chats", "environment": {"type": "tools", "tools": [{"type": "calculator"}]}},
    ],
})  # fmt: skip


def prompt_of(lease_id: int, environment: str | None) -> Prompt:
    row = PROMPTS[PromptOrder(len(PROMPTS), seed=0, shuffle=True).index(lease_id)]
    return Prompt(content=row["prompt"], label=row["label"], metadata={"environment": environment})


async def test_each_group_is_scored_with_the_reward_of_the_environment_that_made_it():
    """The answer holds the label and more: the run's own environment wants it alone."""
    scoring, into = EnvironmentRewards(SEVERAL, None), Rescored()
    several_turns = answered(3, 0, "so")
    mask = several_turns.loss_mask.copy()
    mask[-2] = False
    for lease_id, name in enumerate(("loose", None, "mine", "chats")):
        prompt = prompt_of(lease_id, name)
        answer = answered(lease_id, 0, f"it is {prompt.label}")
        group = [replace(several_turns, loss_mask=mask) if name == "chats" else answer]
        await scoring.rescore(group, prompt, CHAT, into)
    assert [(score.trajectory_id, score.reward) for score in into.scores] == [
        ("g00000000.0", 1.0), ("g00000001.0", 0.0)
    ]  # fmt: skip
    assert into.failures[0] == (
        "g00000002.0: the environment 'mine' computes no reward: name one by --reward"
    )
    assert "g00000003.0, environment 'chats': g00000003.0 has several turns" in into.failures[1]
    await scoring.close()


async def test_a_named_reward_scores_the_groups_of_all_environments():
    scoring, into = EnvironmentRewards(SEVERAL, "contains"), Rescored()
    for lease_id, name in enumerate((None, "mine")):
        prompt = prompt_of(lease_id, name)
        await scoring.rescore([answered(lease_id, 0, f"it is {prompt.label}")], prompt, CHAT, into)
    assert [score.reward for score in into.scores] == [1.0, 1.0]
    none = ActorsConfig.model_validate(
        {"environment": {"type": "plugin", "environment": "my_pkg:Environment"}}
    )
    with pytest.raises(
        ConfigError, match="no environment of the run computes a reward: name one by --reward"
    ):
        EnvironmentRewards(none, None)


def test_without_a_reward_the_own_one_scores_as_it_is_now(run):
    found = rescored(run, None)
    assert (found.reward, found.trajectories, found.comparison.changed_fraction) == ("own-rewards", 6, 0)
    assert Path(found.table).name == "own-rewards.jsonl"


async def test_own_rewards_are_those_of_the_group_where_the_environment_has_such(tmp_path, monkeypatch):
    (tmp_path / "group_rewards_mine.py").write_text(
        "def fn(answers):\n"
        "    if len(answers) == 1: raise ValueError('no sibling')\n"
        "    mean = sum(answer.reward for answer in answers) / len(answers)\n"
        "    return [answer.reward - mean for answer in answers]\n"
    )
    monkeypatch.chdir(tmp_path)
    own = {"type": "single_turn", "group_reward": "group_rewards_mine:fn"}
    actors = ActorsConfig.model_validate({"environment": own})
    group = [
        answered(0, sample, (prompt := prompt_of(0, None)).label if sample else "no") for sample in (0, 1)
    ]
    for reward, expected in ((None, [-0.5, 0.5]), ("exact", [0.0, 1.0])):
        scoring, into = EnvironmentRewards(actors, reward), Rescored()
        await scoring.rescore(group, prompt, CHAT, into)
        assert [score.reward for score in into.scores] == expected
        await scoring.close()
    scoring, into = EnvironmentRewards(actors, None), Rescored()
    await scoring.rescore(group[:1], prompt, CHAT, into)
    await scoring.close()
    assert not into.scores
    assert "g00000000.0: group reward group_rewards_mine:fn" in into.failures[0]
    assert "no sibling" in into.failures[0]


async def test_a_rollout_that_failed_has_no_answer_to_score():
    failed = replace(answered(0, 0, "wrong"), end="environment_error")
    into = Rescored()
    await rescore([failed], Prompt(content="x"), CHAT, Scorer("exact", timeout_s=60), into)
    assert into == Rescored([], [f"{failed.trajectory_id}: its rollout failed: there is no answer"])
