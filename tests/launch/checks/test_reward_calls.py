"""A start calls each reward for each source of prompts: one that never works is found at once."""

import asyncio
import json

import pytest

from actors.rewards.scoring.sample_call import OTHER_TEXT
from bus.errors import ConfigError
from launch.checks.start_checks import rehearse_local
from launch.settings.run_config import resolve

LONG = {"scratch": {"context": 4096}}
STOP = asyncio.Event()
REWARDS = """
import time

def raises(answer):
    return answer.metadata["no such key"]

def no_number(answer):
    return "good"

def nothing_for_wrong_answers(answer):
    if answer.text == answer.label:
        return 1.0

def raises_for_others(answer):
    return float(int(answer.text) == 2)

def wrong_signature(answer, reference):
    return 1.0

def slow(answer):
    time.sleep(60)

def ends(answer):
    import os
    os._exit(7)

def of_group(answers):
    return [1.0]

async def fine(answer):
    print("it prints")
    with open("called", "a") as told:
        told.write(answer.text + "\\n")
    return 1.0
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of rewards in the working directory, and the settings of a run with one of them."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "1+2=", "label": "3"}\n')

    def settings(**environment):
        given = {"directory": tmp_path / "runs", "data": {"prompts": tmp_path / "p.jsonl"}, "model": LONG}
        return resolve({**given, "actors": {"environment": environment}})

    return settings


async def dry_run(config):
    return await rehearse_local(config, STOP, own_bus=True)


@pytest.mark.first(2, others=pytest.mark.nightly)
@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {"reward": "my_rewards:raises"},
            r"(?s)p\.jsonl, prompt 1: the reward 'my_rewards:raises' .*in raises\n.*KeyE",
        ),
        ({"reward": "my_rewards:no_number"}, "returned 'good': a reward is a finite number"),
        ({"reward": "my_rewards:nothing_for_wrong_answers"}, "for the text 'This is a sent.*returned None"),
        ({"reward": "my_rewards:wrong_signature"}, "(?s)TypeError.*missing 1 required positional argument"),
        ({"reward": "my_rewards:slow", "reward_timeout_s": 0.2}, r"no result within 0\.2 s"),
        ({"reward": "my_rewards:ends"}, "its process ended with status 7"),
        ({"group_reward": "my_rewards:of_group"}, "return a list with a reward for each"),
    ],
)
@pytest.mark.slow
async def test_a_reward_that_never_works_is_found_with_its_traceback(mine, environment, told):
    with pytest.raises(ConfigError, match=told):
        await dry_run(mine(**environment))


@pytest.mark.slow
async def test_a_reward_that_works_is_called_twice_and_may_print(mine, tmp_path):
    assert "may start" in await dry_run(mine(reward="my_rewards:fine"))
    assert (tmp_path / "called").read_text() == f"2\n{OTHER_TEXT}\n"
    assert "may start" in await dry_run(mine(reward="my_rewards:raises", sample_call=False))
    assert "may start" in await dry_run(mine(reward="my_rewards:raises_for_others"))


@pytest.mark.slow
async def test_each_source_has_its_reward_called(mine, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"prompt": "ask", "label": "yes"}\n')
    sources = [
        {"name": "p", "prompts": "p.jsonl"},
        {"name": "q", "prompts": "q.jsonl", "reward": "my_rewards:no_number"},
    ]
    config = mine(reward="my_rewards:fine", rewards=["my_rewards:no_number"])
    config = resolve(
        {
            **json.loads(config.model_dump_json()),
            "data": {"sources": sources},
            "directory": str(tmp_path / "runs"),
        }
    )
    with pytest.raises(ConfigError, match=r"prompt 3: the reward 'my_rewards:no_number'"):
        await dry_run(config)
    assert (tmp_path / "called").read_text() == f"2\n{OTHER_TEXT}\n"


async def test_a_label_that_a_built_in_reward_cannot_read_is_refused(mine, tmp_path):
    rows = ["The sum is 72\n#### 72", "#### 1,200.5", "seventy two"]
    lines = [json.dumps({"prompt": "how many?", "label": label}) for label in rows]
    (tmp_path / "p.jsonl").write_text("\n".join(lines[:2]))
    assert "may start" in await dry_run(mine(reward="last_number"))
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"prompt 3: .*label 'seventy two' is not a number"):
        await dry_run(mine(reward="last_number"))
