"""Tasks of reasoning-gym: prompts that name their entry, and its own verifier as reward."""

import pytest

from actors.rewards import registry
from actors.rewards.base import Answer, RewardError
from actors.rewards.reasoning_gym import reasoning_gym
from bus.errors import ConfigError
from storage.config import PromptKeys
from storage.prompts import generators, reasoning_gym_tasks
from storage.prompts.dataset import load_prompts
from storage.prompts.generators import generate_task

KEYS = PromptKeys()


def answer(prompt, text):
    return Answer(
        task_id="t",
        messages=(),
        text=text,
        finish_reason="stop",
        label=prompt.label,
        metadata=prompt.metadata,
    )


@pytest.mark.slow
def test_prompts_of_a_data_set_are_scored_by_its_own_verifier(tmp_path, monkeypatch):
    monkeypatch.setattr(generators, "OF_LIBRARY", 40)
    monkeypatch.setattr(generators, "HELDOUT_OF_LIBRARY", 8)
    files = generate_task("reasoning_gym/chain_sum", tmp_path / "a", seed=3)
    training, heldout = load_prompts(files.prompts, KEYS), load_prompts(files.heldout, KEYS)
    assert (len(training), len(heldout)) == (40, 8)
    assert not {p.content for p in training} & {p.content for p in heldout}
    for prompt in [*training[:5], *heldout[:2]]:
        assert "arithmetic" in prompt.content
        assert reasoning_gym(answer(prompt, f" {prompt.label}\n")) == 1.0
        assert reasoning_gym(answer(prompt, f"so <answer>{prompt.label}</answer> it is")) == 1.0
        assert reasoning_gym(answer(prompt, f"<answer>{int(prompt.label) + 1}</answer>")) < 1.0
    before = files.prompts.read_bytes()
    assert generate_task("reasoning_gym/chain_sum", tmp_path / "a", seed=3) == files
    assert generate_task("reasoning_gym/chain_sum", tmp_path / "b", seed=3).prompts.read_bytes() == before
    assert generate_task("reasoning_gym/chain_sum", tmp_path / "c", seed=4).prompts.read_bytes() != before


@pytest.mark.slow
def test_a_data_set_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="reasoning-gym has no data set 'nothing'"):
        generate_task("reasoning_gym/nothing", tmp_path, seed=0)


def test_a_task_of_another_origin_has_no_such_reward():
    with pytest.raises(RewardError, match="none of reasoning-gym's"):
        reasoning_gym(Answer(task_id="t", messages=(), text="1", finish_reason="stop"))


def test_a_package_that_is_missing_is_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(reasoning_gym_tasks, "find_spec", lambda name: None)
    reasoning_gym_tasks.data_set.cache_clear()
    for refused in (
        lambda: registry.load_reward("reasoning_gym"),
        lambda: generate_task("reasoning_gym/chain_sum", tmp_path, seed=0),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'sluice-rl\[reasoning-gym\]'"):
            refused()
