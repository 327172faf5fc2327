"""Policies play a text game: one player, several sides of one policy, or against an opponent."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import ParamSpec, Self, TypeVar

from actors.environments.games.base import Game, HasScriptedPlayer, Start
from actors.environments.games.built_in import GuessNumberPlay, NimPlay
from actors.episodes.episode import Episode
from actors.episodes.errors import (
    FAULT_FRACTION,
    LONGEST_FAULT,
    REWARD_FAULT,
    EpisodeError,
    LatestUses,
    is_of_host,
)
from actors.episodes.task import ChatMessage, Task
from actors.policy.messages import UNANSWERABLE
from actors.policy.policy import Policy
from actors.settings.games import (
    SCRIPTED,
    SELF,
    AnyGame,
    GameConfig,
    GuessNumber,
    GymnasiumGame,
    Nim,
    PluginGame,
    TextArenaGame,
)
from actors.tools.prompt_tools import refuse_tools
from bus.errors import ConfigError, SluiceError
from bus.policy_names import DEFAULT_POLICY
from bus.process.daemon_call import in_daemon_thread
from bus.process.plugins import load_function
from bus.trajectory import End

P = ParamSpec("P")
T = TypeVar("T")
INLINE = ("guess_number", "nim")
"""Games whose moves take no time worth a thread."""


def game_start(game: AnyGame) -> Start:
    """Return what begins the game. Raises ConfigError for one that cannot be played on this host."""
    match game:
        case GuessNumber():
            return partial(GuessNumberPlay.begin, guesses=game.guesses)
        case Nim():
            return NimPlay.begin
        case TextArenaGame():
            return _text_arena(game)
        case GymnasiumGame():
            return _gymnasium(game)
        case PluginGame():
            return load_function("game", game.start, {})


def _text_arena(game: TextArenaGame) -> Start:
    try:
        from actors.environments.games.text_arena import TextArenaPlay
    except ImportError as error:
        raise _missing("textarena", error) from error
    return TextArenaPlay.checked_start(game)


def _gymnasium(game: GymnasiumGame) -> Start:
    try:
        from actors.environments.games.gym import GymnasiumPlay
    except ImportError as error:
        raise _missing("gymnasium", error) from error
    return GymnasiumPlay.checked_start(game)


def _missing(package: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"actors.environment.game.type={package} needs the package {package} ({error}): "
        f"pip install 'sluice-rl[{package}]'"
    )


@dataclass(slots=True)
class Play:
    """A game while it goes on."""

    game: Game
    players: Mapping[int, str]
    """Who has each side: a policy, an opponent or the game's own player."""
    chats: dict[int, list[ChatMessage]] = field(default_factory=dict)
    """What each side has seen and written."""
    turns: Counter[int] = field(default_factory=Counter)
    end: End | None = None
    """Why the game was broken off; None where the last turn of each side says how that ended."""
    mover: int | None = None
    """Side whose move the game is making, or failed on."""
    moves_s: float = 0.0
    """Time that moves took which have ended."""
    began_s: float | None = None
    """When the move that runs began, by the monotonic clock; None while none runs."""
    fault: str = ""
    """How the game failed on a move of the policy; empty where it did not."""

    def act(self, action: str) -> bool:
        """Make a move; return whether the game is over."""
        self.began_s = monotonic()
        try:
            return self.game.act(action)
        finally:
            self.moves_s, self.began_s = self.moves_s + monotonic() - self.began_s, None

    @property
    def time_in_moves_s(self) -> float:
        """Return how long moves took so far, the running one included, without the wait for a thread."""
        return self.moves_s + (0.0 if self.began_s is None else monotonic() - self.began_s)


class GameEnvironment:
    """Lets the policy play, each side in a chat of its own; rewards come at the end."""

    trajectories_per_episode: int | None = None
    """A game may end before a side has moved, and a chat template may rewrite earlier turns."""

    def __init__(self, config: GameConfig, start: Start) -> None:
        self._config = config
        self._start = start
        self._inline = config.game.type in INLINE
        self._moves, self._games = LatestUses(), LatestUses()

    @classmethod
    def from_config(cls, config: GameConfig) -> Self:
        """Build. Raises ConfigError for a game that cannot be played on this host."""
        return cls(config, game_start(config.game))

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Roll `task` out once. Raises EngineError, or EpisodeError for what the game did."""
        refuse_tools(task, "game")
        policy = policy.fresh(task.task_id)
        game = await self._called(self._start, task.copied())
        with closing(game):
            play = Play(game, self._sides(task, game.players))
            self._refuse_unknown_opponents(play, policy)
            try:
                async with asyncio.timeout(self._config.game_timeout_s):
                    await self._play(play, task, policy)
            except TimeoutError as error:
                limit = self._config.game_timeout_s
                said = f"the game of {task.task_id} took longer than {limit:g} s"
                if play.time_in_moves_s < limit / 2 or not self._blames(play, said):
                    raise EpisodeError(said) from error
            rewards = self._broken_off(play) if play.fault else await self._called(game.rewards)
        episode = self._episode(play, policy, rewards)
        if not play.fault:
            self._games.note(worked=True, reward=min(part.reward for part in episode.trajectories))
        return episode

    def _sides(self, task: Task, players: int) -> dict[int, str]:
        """Return who has each side; the policy's is another one in each rollout of a prompt."""
        asked = self._config
        opponent = (asked.heldout_opponent or asked.opponent) if task.heldout else asked.opponent
        if opponent == SELF:
            return dict.fromkeys(range(players), DEFAULT_POLICY)
        own = 0 if task.heldout else task.sample % players
        return {side: DEFAULT_POLICY if side == own else opponent for side in range(players)}

    def _refuse_unknown_opponents(self, play: Play, policy: Policy) -> None:
        unknown = set(play.players.values()) - {DEFAULT_POLICY, SCRIPTED} - policy.opponents
        if unknown:
            raise EpisodeError(f"there is no opponent {min(unknown)!r}: define it in actors.opponents")
        if SCRIPTED in play.players.values() and not isinstance(play.game, HasScriptedPlayer):
            raise EpisodeError("the game has no player of its own: give it a method `scripted`")

    async def _play(self, play: Play, task: Task, policy: Policy) -> None:
        ended = False
        while not ended:
            if play.turns.total() == self._config.game_turns:
                play.end = "turn_limit"
                return
            side = play.game.player
            action = await self._action(play, side, task, policy)
            if action is None:
                play.end = "length"
                return
            play.turns[side] += 1
            play.mover = side
            try:
                ended = await self._called(play.act, action)
            except Exception as error:  # a game may raise anything
                if isinstance(error, SluiceError) or is_of_host(error) or not self._blames(play, repr(error)):
                    raise
                return
            self._moves.note(worked=True)
            play.mover = None

    def _blames(self, play: Play, fault: str) -> bool:
        """Note that the game failed on a move, and whether the policy that made it is to blame."""
        if play.mover is None:
            return False
        self._moves.note(worked=False)
        is_own = play.players[play.mover] == DEFAULT_POLICY
        if is_own and self._moves.work and self._config.lowest is not None:
            play.fault = fault
        return bool(play.fault)

    def _broken_off(self, play: Play) -> Sequence[float]:
        """Return the rewards of a game that failed on a player's move: the lowest for that player."""
        lowest = self._games.lowest(self._config.lowest) or 0.0
        return [lowest if side == play.mover else 0.0 for side in range(play.game.players)]

    async def _action(self, play: Play, side: int, task: Task, policy: Policy) -> str | None:
        """Return a side's move; None where its context has no room for one."""
        who, game = play.players[side], play.game
        if who == SCRIPTED:
            assert isinstance(game, HasScriptedPlayer)  # `_refuse_unknown_opponents` has looked
            return await self._called(game.scripted)
        seen: ChatMessage = {"role": "user", "content": await self._called(game.observation)}
        chat = play.chats.setdefault(side, [*task.messages[:-1]])
        chat.append(seen)
        try:
            completion = await policy.chat(chat, agent_of(side, game.players), policy=who)
        except UNANSWERABLE:
            if not play.turns[side]:
                raise  # the prompt itself cannot be answered
            return None
        chat.append(completion.message)
        return completion.content

    def _episode(self, play: Play, policy: Policy, rewards: Sequence[float]) -> Episode:
        if len(rewards) != play.game.players:
            raise EpisodeError(f"the game has {play.game.players} players, and rewards {list(rewards)}")
        agents = {agent_of(side, len(rewards)): float(reward) for side, reward in enumerate(rewards)}
        own = min(side for side, who in play.players.items() if who == DEFAULT_POLICY)
        recorded = policy.trajectories(agents, end=play.end)
        if not recorded:
            raise EpisodeError("the game ended before the policy moved: begin it otherwise")
        if play.fault:
            fault = {REWARD_FAULT: play.fault[:LONGEST_FAULT]}
            recorded = tuple(replace(part, metadata={**part.metadata, **fault}) for part in recorded)
        return Episode(
            recorded,
            {"rollout/turns": float(play.turns.total()), FAULT_FRACTION: float(bool(play.fault))},
            outcome=float(rewards[own]),
        )

    async def _called(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a game, in a thread unless it is known to be quick. Whatever hangs has a thread of its own, so
        that it takes none of those that weights are read in."""
        if self._inline:
            return function(*args, **kwargs)
        return await in_daemon_thread(partial(function, *args, **kwargs), "game")


def agent_of(side: int, players: int) -> str:
    return "player" if players == 1 else f"player-{side + 1}"
