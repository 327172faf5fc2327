"""Built-in tasks of games and of agents together: what their files say, and how noisy they are."""

from random import Random

import pytest

from storage.built_in_tasks.demonstrations import NIM_STARTS, guess_demonstration, nim_demonstration
from storage.built_in_tasks.generators import TASKS, generate_task, load_demonstrations
from storage.prompt_files.dataset import load_prompts
from storage.settings.data import PromptKeys

KEYS = PromptKeys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["guess", pytest.param("nim", marks=pytest.mark.slow)])
def test_prompts_and_held_out_prompts_share_no_problem(name, tmp_path):
    files = generate_task(name, tmp_path, seed=1)
    training, heldout = (
        {(p.content, p.label) for p in load_prompts(path, KEYS)} for path in (files.prompts, files.heldout)
    )
    assert not training & heldout
    assert len(heldout) == TASKS[name].heldout
    assert len(training) + len(heldout) == TASKS[name].problems
    assert len(load_demonstrations(files.demonstrations)) == TASKS[name].demonstrations


def test_a_right_guess_is_the_middle_of_what_the_answers_before_it_leave():
    for seed in range(300):
        chat, guess = guess_demonstration(15, Random(seed), False)  # guess 30-36, and the number is 31
        low, high = 30, 36
        for said, told in zip(chat[1::2], chat[2::2], strict=True):
            before = int(said["content"])
            low, high = (
                (max(low, before + 1), high) if told["content"] == "higher" else (low, min(high, before - 1))
            )
        assert chat[0]["content"] == "guess 30-36 a"
        assert int(guess) == (low + high) // 2
        assert low <= 31 <= high


def test_wrong_guesses_are_anywhere_in_the_range():
    guesses = {int(guess_demonstration(15, Random(seed), True)[1]) for seed in range(400)}
    assert guesses == set(range(30, 37))


@pytest.mark.parametrize("wrong", [False, True])
def test_moves_of_nim_follow_the_rules_and_right_ones_leave_a_pile_that_cannot_be_won(wrong):
    for seed in range(300):
        chat, move = nim_demonstration(NIM_STARTS.index((11, 3)), Random(seed), wrong)
        piles = [int(message["content"].split()[-2]) for message in chat[::2]]
        taken = [int(message["content"]) for message in chat[1::2]]
        assert piles[0] == 11
        for before, own, after in zip(piles, taken, piles[1:], strict=False):
            assert 1 <= own <= 3
            assert 1 <= before - own - after <= 3
        assert 1 <= int(move) <= min(3, piles[-1])
        assert wrong or piles[-1] % 4 == (int(move) if piles[-1] % 4 else 0)
        assert not wrong or move == "1"
