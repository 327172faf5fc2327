"""The game that a configuration names."""

from functools import partial

from actors.environments.games.base import Start
from actors.environments.games.guess_number import GuessNumberPlay
from actors.environments.games.nim import NimPlay
from actors.settings.games import AnyGame, GuessNumber, GymnasiumGame, Nim, PluginGame, TextArenaGame
from bus.errors import ConfigError
from bus.process.plugins import load_function


def game_start(game: AnyGame) -> Start:
    """Return what begins it. Raises ConfigError for one that cannot be played on this host."""
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
