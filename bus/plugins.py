"""Loads functions that settings name: built in, or the user's own as `my_pkg.my_module:function`."""

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

from bus.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
# launch/process/own_packages.py has this list again: it runs before `bus` may be imported.
OWN_PACKAGES = ("actors", "bus", "launch", "learner", "storage")


def load_function(kind: str, name: str, builtins: Mapping[str, Callable[P, R]]) -> Callable[P, R]:
    """Return the built-in `name`, or import `my_pkg.my_module:function` (the working directory counts).

    Raises ConfigError, which names `kind`, for what does not exist, does not import or is not callable."""
    if name in builtins:
        return builtins[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(_unknown(kind, name, builtins))
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        hint = _same_name_hint(module_name)
        raise ConfigError(f"{kind} {name!r}: importing {module_name!r} failed: {error!r}{hint}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        state = "is not callable" if hasattr(module, attribute) else "does not exist"
        close = difflib.get_close_matches(
            attribute, [key for key in vars(module) if not key.startswith("_")], 1
        )
        hint = f": did you mean {close[0]!r}?" if close and close[0] != attribute else ""
        hint = _same_name_hint(module_name) or hint
        raise ConfigError(f"{kind} {name!r}: {attribute!r} in {module_name!r} {state}{hint}")
    return cast(Callable[P, R], function)


def _same_name_hint(module_name: str) -> str:
    """Return what to do where the working directory has a file or package of the same name as one of ours."""
    top = module_name.partition(".")[0]
    own = [path for path in (Path(f"{top}.py"), Path(top)) if path.exists()]
    if top not in OWN_PACKAGES or not own or own[0].resolve() == (Path(__file__).parents[1] / top):
        return ""
    return f": {top!r} is a package of Sluice, so {str(own[0])!r} here is not imported: rename it"


def _unknown(kind: str, name: str, builtins: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, builtins, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return (
        f"no {kind} named {name!r}: {hint}built in are {', '.join(sorted(builtins))}; "
        "your own is written my_pkg.my_module:function"
    )
