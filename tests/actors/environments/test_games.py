"""Text games: rules, turns, sides and rewards, with engines that answer by a script."""

import asyncio
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.engines.base import Sampling
from actors.environments.base import Environment
from actors.environments.build import build_environment
from actors.environments.games.built_in import GuessNumberPlay, NimPlay
from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task
from actors.policy.other_engines import OtherEngines
from actors.policy.policy import Policy
from actors.settings.actors import ActorsConfig
from actors.settings.games import GameConfig, GymnasiumGame, Nim, PluginGame, TextArenaGame
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError
from launch.settings.run_config import resolve
from learner.initial.scratch_model import character_tokenizer
from storage.built_in_tasks import demonstrations
from storage.built_in_tasks.generators import TASKS

GUESS = Task(task_id="g", prompt="guess 10-24", label="20")


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


def nim(prompt="nim 6 3", **fields):
    return Task(task_id="n", prompt=prompt, **fields)


def saying(tokenizer, *answers, version=0):
    replies = iter(answers)
    return ScriptedEngine(lambda _: tokenizer.encode(next(replies) + "<|end|>"), policy_version=version)


def player(tokenizer, *answers, opponents=None):
    engines = {name: saying(tokenizer, *said, version=1) for name, said in (opponents or {}).items()}
    engine = saying(tokenizer, *answers, version=7)
    return Policy(engine, tokenizer, Sampling(max_new_tokens=16), others=OtherEngines(opponents=engines))


def texts(tokenizer, trajectory):
    return tokenizer.decode(trajectory.token_ids)


async def test_a_guessing_game_has_one_trajectory_of_several_turns_and_a_reward_at_the_end(tokenizer):
    environment: Environment = build_environment(GameConfig())
    episode = await environment.run(GUESS, player(tokenizer, "17", "x", "22", "20"))
    [trajectory] = episode.trajectories
    assert texts(tokenizer, trajectory) == (
        "<|user|>guess 10-24<|assistant|>17<|end|><|user|>higher<|assistant|>x<|end|>"
        "<|user|>not a number<|assistant|>22<|end|><|user|>lower<|assistant|>20<|end|>"
    )
    assert (trajectory.reward, trajectory.end, episode.outcome) == (1.0, "completed", 1.0)
    assert [turn.reward for turn in trajectory.turns] == [None] * 4
    assert int(trajectory.loss_mask.sum()) == 3 + 2 + 3 + 3


async def test_a_number_that_was_not_found_gives_nothing(tokenizer):
    environment = build_environment(GameConfig())
    episode = await environment.run(GUESS, player(tokenizer, "10", "11", "12", "13", "20"))
    assert (episode.trajectories[0].reward, len(episode.trajectories[0].turns)) == (0.0, 4)


@pytest.mark.parametrize("label", [None, "four", "-1", "\u0664"])
async def test_a_task_without_a_number_to_guess_fails(tokenizer, label):
    environment = build_environment(GameConfig())
    with pytest.raises(EpisodeError, match="give the number to guess"):
        await environment.run(Task(task_id="g", prompt="guess", label=label), player(tokenizer, "1"))


@given(st.integers(0, TASKS["guess"].problems - 1))
def test_halving_the_range_finds_every_number_of_the_task_in_three_guesses(number):
    prompt, label = demonstrations.guess_problem(number)
    low, high = map(int, prompt.split()[1].split("-"))
    game = GuessNumberPlay.begin(Task(task_id="g", prompt=prompt, label=label), guesses=3)
    ended = False
    while not ended:
        guess = (low + high) // 2
        ended = game.act(str(guess))
        if game.observation() == "higher":
            low = guess + 1
        else:
            high = guess - 1
    assert game.rewards() == (1.0,)


@given(st.integers(0, TASKS["nim"].problems - 1), st.randoms(use_true_random=False))
def test_the_perfect_player_wins_every_start_of_the_task_against_anybody(number, rng):
    prompt, best = demonstrations.nim_problem(number)
    game = NimPlay.begin(nim(prompt))
    assert game.scripted() == best
    ended = False
    while not ended:
        pile, most = map(int, game.observation().split()[-2:])
        other = str(rng.randint(1, min(pile, most)))
        ended = game.act(game.scripted() if game.player == 0 else other)
    assert game.rewards() == [1.0, 0.0]


@pytest.mark.parametrize("move", ["0", "4", "-1", "", "two", "1 2", "\u0661", "9" * 5000])
def test_a_move_against_the_rules_loses(move):
    game = NimPlay.begin(nim("nim 9 3"))
    assert not game.act("2")
    assert game.act(move)
    assert game.rewards() == [1.0, 0.0]


async def test_both_sides_of_self_play_are_trained_each_on_its_own_chat(tokenizer):
    environment = build_environment(GameConfig(game=Nim()))
    episode = await environment.run(nim(), player(tokenizer, "2", "1", "3"))
    first, second = episode.trajectories
    assert texts(tokenizer, first) == ("<|user|>nim 6 3<|assistant|>2<|end|><|user|>3 3<|assistant|>3<|end|>")
    assert texts(tokenizer, second) == "<|user|>nim 4 3<|assistant|>1<|end|>"
    assert [(t.agent, t.reward, t.is_trained) for t in (first, second)] == [
        ("player-1", 1.0, True), ("player-2", 0.0, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sample", "heldout", "own"), [(0, False, 0), (1, False, 1), (2, False, 0), (1, True, 0)]
)
async def test_an_opponent_has_the_other_side_and_is_recorded_but_not_trained(
    tokenizer, sample, heldout, own
):
    environment = build_environment(GameConfig(game=Nim(), opponent="past"))
    policy = player(tokenizer, "1", "1", "1", opponents={"past": ["1", "1", "1"]})
    episode = await environment.run(nim(sample=sample, heldout=heldout), policy)
    assert episode.outcome == float(own == 1)  # six sticks, one at a time: the second player takes the last
    by_side = {t.agent: t for t in episode.trajectories}
    mine, theirs = by_side[f"player-{own + 1}"], by_side[f"player-{2 - own}"]
    assert (mine.policy, mine.is_trained, mine.loss_mask.any()) == ("default", True, True)
    assert (theirs.policy, theirs.is_trained, theirs.loss_mask.any()) == ("past", False, False)
    assert {*mine.policy_versions} == {-1, 7}
    assert {*theirs.policy_versions} == {-1, 1}


async def test_held_out_games_may_be_against_another_player_than_those_trained_on(tokenizer):
    config = GameConfig(game=Nim(), opponent="past", heldout_opponent="scripted")
    environment = build_environment(config)
    policy = player(tokenizer, "2", "3", "2", "3", opponents={"past": ["1", "1"]})
    measured = await environment.run(nim(heldout=True), policy)
    assert [t.agent for t in measured.trajectories] == ["player-1"]
    assert measured.outcome == 1.0
    trained = await environment.run(nim(), policy)
    assert [t.policy for t in trained.trajectories] == ["default", "past"]


async def test_a_game_that_does_not_end_is_broken_off_without_a_winner(tokenizer):
    environment = build_environment(GameConfig(game=Nim(), game_turns=3))
    episode = await environment.run(nim("nim 9 3"), player(tokenizer, "1", "1", "1"))
    assert [(t.end, t.reward) for t in episode.trajectories] == [("turn_limit", 0.0)] * 2


async def test_a_move_that_was_cut_off_ends_its_side_as_length(tokenizer):
    policy = Policy(saying(tokenizer, "1234", "9"), tokenizer, Sampling(max_new_tokens=2))
    episode = await build_environment(GameConfig(game=Nim())).run(nim("nim 20 19"), policy)
    first, second = [(t.end, t.reward) for t in episode.trajectories]
    assert (first, second) == (("length", 1.0), ("completed", 0.0))  # 12 are taken, and 9 are too many


async def test_a_game_that_is_over_before_the_policy_moves_is_no_episode(tokenizer):
    environment = build_environment(GameConfig(game=Nim(), opponent="scripted"))
    with pytest.raises(EpisodeError, match="before the policy moved"):
        await environment.run(nim("nim 2 3", sample=1), player(tokenizer))


class Duel:
    """A user's own game of two moves; the longer word wins."""

    players = 2
    closed = 0

    def __init__(self, task):
        self.player = 0
        self._words = []

    def observation(self):
        return "say"

    def act(self, action):
        if action == "boom":
            raise RuntimeError("the game fell over")
        if action in ("exit", "next"):
            sys.exit(1) if action == "exit" else next(iter(()))
        self._words.append(action)
        self.player = 1
        return len(self._words) == 2

    def rewards(self):
        lengths = [*map(len, self._words)]
        return [float(length == max(lengths)) for length in lengths]

    def close(self):
        Duel.closed += 1


async def test_a_game_of_the_users_own_is_played_in_threads_and_closed(tokenizer):
    environment = build_environment(GameConfig(game=PluginGame(type="plugin", start=f"{__name__}:Duel")))
    with pytest.raises(RuntimeError, match="fell over"):  # no move has worked: the game is broken
        await environment.run(Task(task_id="d", prompt="x"), player(tokenizer, "boom"))
    episode = await environment.run(Task(task_id="d", prompt="x"), player(tokenizer, "aa", "bbb"))
    assert [t.reward for t in episode.trajectories] == [0.0, 1.0]
    assert Duel.closed == 2


@pytest.mark.parametrize(("move", "said"), [("exit", "SystemExit"), ("next", "StopIteration")])
async def test_a_game_that_exits_or_lacks_a_next_is_told_at_once(tokenizer, move, said):
    """No future of asyncio holds a StopIteration: whoever awaits it would wait for ever."""
    game = PluginGame(type="plugin", start=f"{__name__}:Duel")
    environment = build_environment(GameConfig(game=game, game_timeout_s=3600))
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match=said):
            await environment.run(Task(task_id="d", prompt="x"), player(tokenizer, move))


async def test_a_game_without_a_player_of_its_own_cannot_be_played_against_it(tokenizer):
    config = GameConfig(game=PluginGame(type="plugin", start=f"{__name__}:Duel"), opponent="scripted")
    with pytest.raises(EpisodeError, match="give it a method `scripted`"):
        await build_environment(config).run(Task(task_id="d", prompt="x"), player(tokenizer, "aa"))


def test_settings_of_players_that_do_not_exist_are_refused():
    with pytest.raises(ValidationError, match="guess_number has no player of its own"):
        GameConfig(opponent="scripted")
    nim_against = {"type": "game", "game": {"type": "nim"}, "opponent": "past"}
    with pytest.raises(ConfigError, match=r"'past' is none of opponents \(none\): define it"):
        resolve({"actors": {"environment": nim_against}})
    ActorsConfig(environment=nim_against, opponents={"past": {"version": "latest - 3"}})
    with pytest.raises(ValidationError, match=r"opponents.self: this name means another player"):
        ActorsConfig(opponents={"self": {"version": 0}})


@pytest.mark.slow
async def test_a_game_of_textarena_begins_alike_for_a_prompt_and_ends_with_its_rewards(tokenizer):
    game = TextArenaGame(type="textarena", id="KuhnPoker-v0", players=2)
    environment = build_environment(GameConfig(game=game))
    task = Task(task_id="k", prompt="seed 5")
    first, second = [
        await environment.run(task, player(tokenizer, *["[fold]", "[check]"] * 40)) for _ in range(2)
    ]
    beginnings = [t.token_ids[: t.turns[0].start].tolist() for t in first.trajectories]
    assert beginnings == [t.token_ids[: t.turns[0].start].tolist() for t in second.trajectories]
    assert "round game of" in tokenizer.decode(beginnings[0])
    assert {t.end for t in first.trajectories} <= {"completed", "turn_limit"}


async def test_an_environment_of_gymnasium_is_played_by_numbers_or_words(tokenizer):
    game = GymnasiumGame(type="gymnasium", id="Blackjack-v1", actions=("stick", "hit"))
    environment = build_environment(GameConfig(game=game))
    task = Task(task_id="b", prompt="cards", metadata={"seed": 1})  # begins with (20, 7, 0)
    stuck = await environment.run(task, player(tokenizer, "stick"))
    same = await environment.run(task, player(tokenizer, "0"))
    assert "(20, 7, 0)" in tokenizer.decode(stuck.trajectories[0].token_ids)
    assert [e.trajectories[0].reward for e in (stuck, same)] == [stuck.outcome] * 2
    assert abs(stuck.outcome) == 1.0
    for nonsense in ("pass", "2", "-1"):
        episode = await environment.run(task, player(tokenizer, nonsense))
        assert (episode.trajectories[0].reward, episode.trajectories[0].end) == (-1.0, "completed")


@pytest.mark.slow
@pytest.mark.parametrize("game", [
    {"type": "textarena", "id": "Nothing-v0"},
    {"type": "textarena", "id": "KuhnPoker-v0", "players": 5},
    {"type": "gymnasium", "id": "Nothing-v0"},
    {"type": "gymnasium", "id": "Pendulum-v1"},
])  # fmt: skip
def test_games_that_cannot_begin_are_refused_at_the_start(game):
    with pytest.raises(ConfigError, match="cannot begin"):
        build_environment(GameConfig.model_validate({"game": game}))


@pytest.mark.parametrize("package", ["textarena", "gymnasium"])
def test_a_package_that_is_missing_is_named_with_the_remedy(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("text_arena", "gym"):
        monkeypatch.delitem(sys.modules, f"actors.environments.games.{module}", raising=False)
    with pytest.raises(ConfigError, match=rf"pip install 'sluice-rl\[{package}\]'"):
        build_environment(GameConfig.model_validate({"game": {"type": package, "id": "Any-v0"}}))
