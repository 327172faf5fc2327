"""Tasks of reasoning-gym: prompts that hold their entry, and its own verifier as reward."""

import pytest

from actors.rewards.base import RewardError, Scored
from actors.rewards.builtin import registry
from actors.rewards.scoring.scorers import Scorer
from actors.settings.rewards import RewardConfig
from bus.errors import ConfigError
from storage.built_in_tasks import generators, reasoning_gym_tasks
from storage.built_in_tasks.generators import generate_task
from storage.built_in_tasks.reasoning_gym_tasks import exact_text, exact_value
from storage.prompt_files.dataset import load_prompts
from storage.settings.data import PromptKeys
from tests.actors.rewards.gym_entries import ENTRY, QUESTION, row_answer, to, written_elsewhere

KEYS = PromptKeys()

HASHED = ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Data sets that make other entries of the same seed where Python's hashes have another one."""


@pytest.fixture
async def scorer():
    scorer = Scorer.from_config("reasoning_gym", RewardConfig(reward="reasoning_gym", reward_timeout_s=5))
    yield scorer
    await scorer.close()


@pytest.mark.slow
async def test_prompts_of_a_data_set_are_scored_by_its_own_verifier(tmp_path, monkeypatch, scorer):
    monkeypatch.setattr(generators, "OF_LIBRARY", 40)
    monkeypatch.setattr(generators, "HELDOUT_OF_LIBRARY", 8)
    files = generate_task("reasoning_gym/chain_sum", tmp_path / "a", seed=3)
    training, heldout = load_prompts(files.prompts, KEYS), load_prompts(files.heldout, KEYS)
    assert (len(training), len(heldout)) == (40, 8)
    assert not {p.content for p in training} & {p.content for p in heldout}
    for prompt in [*training[:5], *heldout[:2]]:
        asked = (prompt.content, prompt.label, prompt.metadata)
        assert "arithmetic" in prompt.content
        assert await scorer.score(to(f" {prompt.label}\n", *asked)) == 1.0
        assert await scorer.score(to(f"so <answer>{prompt.label}</answer> it is", *asked)) == 1.0
        assert await scorer.score(to(f"<answer>{int(prompt.label) + 1}</answer>", *asked)) < 1.0
    before = files.prompts.read_bytes()
    assert generate_task("reasoning_gym/chain_sum", tmp_path / "a", seed=3) == files
    assert generate_task("reasoning_gym/chain_sum", tmp_path / "b", seed=3).prompts.read_bytes() == before
    assert generate_task("reasoning_gym/chain_sum", tmp_path / "c", seed=4).prompts.read_bytes() != before


@pytest.mark.slow
async def test_right_answers_to_entries_that_another_process_made_score_as_they_did_there(tmp_path, scorer):
    found = written_elsewhere(tmp_path, 8, *HASHED)
    for rows in found.values():
        assert [row["score"] for row in rows] == [1.0] * 8
        for row in rows:
            assert await scorer.score(row_answer(row, f"<answer>{row['label']}</answer>")) == 1.0


@pytest.mark.slow
async def test_a_prompt_that_does_not_ask_its_entry_is_refused(scorer):
    with pytest.raises(RewardError, match=r"does not ask what its entry .* asks, 'What is 2 \+ 3\?'"):
        await scorer.score(to("5", "What is 2 + 4?"))
    assert await scorer.score(to("5", f"Think first.\n{QUESTION}\nAnswer with a number.")) == 1.0


BROKEN_BY_WORDS = {
    "prime_factorization": "2 \u00d7 x",
    "boxnet": '[{"Agent[0.5, 0.5]": "move(box_blue, square[x])"}, 5]',
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN_BY_WORDS)
async def test_an_answer_that_makes_the_verifier_raise_scores_the_lowest_reward(name, scorer):
    [row] = reasoning_gym_tasks.prompt_rows(name, size=1, seed=3)
    found = await scorer.scored(row_answer(row, BROKEN_BY_WORDS[name]))
    assert isinstance(found, Scored)
    assert found.reward == 0.0
    assert "works on another answer" in found.fault


@pytest.mark.slow
async def test_an_answer_that_makes_the_verifier_hang_scores_the_lowest_reward_and_another_is_an_error(
    scorer, monkeypatch
):
    question = {"question": "q", "answer": "(1 + 1)", "metadata": {"numbers": [1, 1], "target": 2}}
    kept = {"data_set": "countdown", "package": "", "entry": exact_text(question)}
    found = await scorer.scored(to("9**9**9**9", "q", "2", {"reasoning_gym": kept}))
    assert (found.reward, "no result within 5 s" in found.fault) == (0.0, True)
    kept["entry"] = exact_text({**question, "metadata": {}})  # the verifier fails on every answer
    kept["data_set"] = "prime_factorization"
    kept["entry"] = exact_text({"question": "q", "answer": "x", "metadata": {}})
    with pytest.raises(RewardError, match="the verifier, the label or the host is broken"):
        await scorer.score(to("2 \u00d7 3", "q", "x", {"reasoning_gym": kept}))


@pytest.mark.slow
async def test_what_an_answer_says_is_never_run(scorer, tmp_path):
    """Verifiers evaluate lists and expressions, as which a policy could write a program."""
    made = tmp_path / "made"
    program = f"__import__('pathlib').Path({str(made)!r}).touch()"
    letters = "+".join(f"chr({ord(one)})" for one in program)
    for name in ("n_queens", "binary_matrix", "countdown", "puzzle24", "polynomial_multiplication"):
        [row] = reasoning_gym_tasks.prompt_rows(name, size=1, seed=3)
        for text in (program, f"eval({letters})", f"[{program}]"):
            assert await scorer.score(row_answer(row, text)) < 0.2
        assert not made.exists(), name


@pytest.mark.slow
async def test_verifiers_that_read_answers_as_expressions_know_right_ones(scorer):
    """One has a parser of its own, and one simplifies by sympy, which reads texts of its own."""
    [row] = reasoning_gym_tasks.prompt_rows("propositional_logic", size=1, seed=3)
    right = exact_value(row["metadata"]["reasoning_gym"]["entry"])["metadata"]["example_answer"]
    assert await scorer.score(row_answer(row, right)) == 1.0
    integral = {"question": "q", "answer": "", "metadata": {"integrand": "3*x**3*exp(x)", "variable": "x"}}
    kept = {"data_set": "intermediate_integration", "package": "", "entry": exact_text(integral)}
    solved = "(3*x**3 - 9*x**2 + 18*x - 18)*exp(x) + C"
    assert await scorer.score(to(solved, "q", "", {"reasoning_gym": kept})) == 1.0
    bits = {"question": "q", "answer": "0xc", "metadata": {"problem": "(0x4 + 0x2) * 0x2"}}
    kept = {"data_set": "bitwise_arithmetic", "package": "", "entry": exact_text(bits)}
    assert await scorer.score(to("0xc", "q", "0xc", {"reasoning_gym": kept})) == 1.0


def test_values_are_given_back_as_they_were():
    value = {
        "a": (1, [2.5, None, True], {"x", "y"}), "$": frozenset({1}), 3: {"of": float("inf")},
        "large": 2**70, (1, 2): -0.0, "text": "\u2028",
    }  # fmt: skip
    found = exact_value(exact_text(value))
    assert found == value
    assert [type(one) for one in found["a"]] == [int, list, set]
    assert str(found[1, 2]) == "-0.0"


@pytest.mark.parametrize(
    ("value", "place"), [({"a": [{1: object()}]}, r"it\.a\[0\]\[1\]"), (b"x", "it is of")]
)
def test_a_value_that_cannot_be_given_back_is_named(value, place):
    with pytest.raises(TypeError, match=place):
        exact_text(value)


def test_an_entry_that_cannot_be_stored_is_refused_at_the_start(monkeypatch):
    with pytest.raises(ConfigError, match=r"reasoning_gym/mine: an entry cannot be stored .*it\.metadata"):
        reasoning_gym_tasks.stored_entry("mine", {**ENTRY, "metadata": object()})
    monkeypatch.setattr(reasoning_gym_tasks, "MOST_ENTRY_BYTES", 50)
    with pytest.raises(ConfigError, match="and 50 are stored with a prompt at most"):
        reasoning_gym_tasks.stored_entry("mine", ENTRY)


@pytest.mark.slow
def test_a_data_set_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="reasoning-gym has no data set 'nothing'"):
        generate_task("reasoning_gym/nothing", tmp_path, seed=0)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({}, "none of reasoning-gym's"),
        ({"reasoning_gym": {"data_set": "x", "entry": "{"}}, "its entry of reasoning_gym/x cannot be read"),
        ({"reasoning_gym": {"data_set": "x", "entry": '{"question":"q"}'}}, "cannot be read"),
        ({"reasoning_gym": {"data_set": "x", "size": "9"}}, "cannot be read"),
    ],
)
async def test_a_task_of_another_origin_has_no_such_reward(metadata, told, scorer):
    with pytest.raises(RewardError, match=told):
        await scorer.score(to("1", metadata=metadata))


def test_a_package_that_is_missing_is_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(reasoning_gym_tasks, "find_spec", lambda name: None)
    reasoning_gym_tasks.data_set.cache_clear()
    for refused in (
        lambda: registry.load_reward("reasoning_gym"),
        lambda: generate_task("reasoning_gym/chain_sum", tmp_path, seed=0),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'sluice-rl\[reasoning-gym\]'"):
            refused()
