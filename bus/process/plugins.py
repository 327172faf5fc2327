"""Loads functions that settings name: built in, or the user's own as `my_pkg.my_module:function`.

A process may restrict which of them it imports, since their names come from a run that others define."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from pydantic import BaseModel, ValidationError

from bus.errors import ConfigError, nearest

P = ParamSpec("P")
R = TypeVar("R")
# launch/process/own_packages.py has this list again: it runs before `bus` may be imported.
OWN_PACKAGES = ("actors", "bus", "launch", "learner", "storage")
CHECKOUT_PACKAGES = ("benchmarks", "soak")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Name of a user's own function."""
RAISED = (Exception, SystemExit)
"""What a user's code raises that must not end a process of ours, `sys.exit` among it."""
NAME_IT_HERE = "; or name it in this host's own settings"


@dataclass(frozen=True)
class ImportPolicy:
    """Which modules a process imports for a run; built-in functions are always there."""

    directories: tuple[Path, ...] = ()
    """Directories that modules have to lie in; without any they may lie anywhere."""
    refusal: str = ""
    """Says why names are refused that this host did not give itself; empty where they are not."""
    own: frozenset[str] = frozenset()
    """Names that this host gave."""


_policy = ImportPolicy()


def restrict_imports(policy: ImportPolicy) -> None:
    """Have this process load functions by `policy` from now on. It holds for the whole process, as imports
    do, so that no caller can forget it."""
    global _policy
    _policy = policy


def refuse_of_record(what: str, *names: str, is_program: bool = False) -> None:
    """Raise ConfigError unless this host named all of this itself, where others write the run's record.

    Args:
        what: describes it in the error.
        names: of something on this host that the run would use, such as an environment variable, or the
            command of a program.
        is_program: it runs code that is no module, which a host that gives directories for modules refuses
            whoever writes the record."""
    reason = _policy.refusal
    if is_program and not reason and _policy.directories:
        reason = "is a program, and --plugins-from allows modules only"
    if reason and not _policy.own.issuperset(names):
        raise ConfigError(f"{what} {reason}{NAME_IT_HERE if is_program else ''}")


def names_function(name: object) -> bool:
    """Return whether a setting that may be a path names a function, as `my_pkg.my_module:function`."""
    return FUNCTION.fullmatch(str(name)) is not None


def load_function(kind: str, name: str, builtins: Mapping[str, Callable[P, R]]) -> Callable[P, R]:
    """Return the built-in `name`, or import `my_pkg.my_module:function` (the working directory counts).
    Raises ConfigError, which names `kind`, for what does not exist, does not import or is not callable."""
    if name in builtins:
        return builtins[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(_unknown(kind, name, builtins))
    what = f"{kind} {name!r}"
    if _policy.directories:
        _refuse_outside(what, module_name)
    else:
        refuse_of_record(what, name)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except RAISED as error:  # a user's module may raise anything
        hint = _same_name_hint(module_name)
        if (
            not hint
            and isinstance(error, ModuleNotFoundError)
            and error.name == module_name.partition(".")[0]
        ):
            hint = f": start in the directory that holds {error.name!r}, or install it"
        raise ConfigError(f"{kind} {name!r}: importing {module_name!r} failed: {error!r}{hint}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        state = "is not callable" if hasattr(module, attribute) else "does not exist"
        others = (key for key in vars(module) if not key.startswith("_") and key != attribute)
        hint = f": {meant.strip()}" if (meant := nearest(attribute, others)) else ""
        hint = _same_name_hint(module_name) or hint
        raise ConfigError(f"{kind} {name!r}: {attribute!r} in {module_name!r} {state}{hint}")
    if _policy.directories:
        _refuse_foreign(what, function)
    return cast(Callable[P, R], function)


def built_part(
    kind: str, name: str, settings: Mapping[str, Any], parts: Sequence[str], *, at: str = "settings"
) -> object:
    """Build a part of the user's own, such as a tool: the class `name`, with settings as its nested class
    `Settings` declares them, which are called `at` where they are wrong.

    Raises ConfigError, which names `kind`, as `load_function` does, for wrong settings, and for what cannot
    be built or lacks one of `parts`."""
    factory: Callable[..., object] = load_function(kind, name, {})
    arguments = _declared(kind, name, settings, getattr(factory, "Settings", None), at)
    try:
        found = factory(*arguments)
    except ConfigError:
        raise
    except RAISED as error:  # the user's class may raise anything
        raise ConfigError(f"{kind} {name!r} cannot be built: {error!r}") from error
    if missing := [part for part in parts if not hasattr(found, part)]:
        raise ConfigError(f"{kind} {name!r} has no {' and no '.join(missing)}: see docs/extending.md")
    return found


def _declared(
    kind: str, name: str, settings: Mapping[str, Any], declared: type | None, at: str
) -> list[BaseModel]:
    if not (isinstance(declared, type) and issubclass(declared, BaseModel)):
        if settings:
            raise ConfigError(
                f"{kind} {name!r} takes no settings: declare them in a nested pydantic class Settings, or "
                f"leave out {at}"
            )
        return []
    try:
        return [declared.model_validate(settings)]
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, (at, *problem['loc'])))}: {problem['msg']}" for problem in error.errors()
        ]
        problems.append(f"Settings of {name!r} are: {', '.join(declared.model_fields)}")
        raise ConfigError("\n".join(problems)) from error


def _refuse_outside(what: str, module_name: str) -> None:
    """Import a module from the allowed directories, its packages first. Raises `ConfigError` for one that
    lies elsewhere, before anything of it runs."""
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"{what}: {module_name!r} is no name of a module")
    for directory in _policy.directories:
        if str(directory) not in sys.path:
            sys.path.append(str(directory))  # last: a module of the same name elsewhere is seen, and refused
    parts = module_name.split(".")
    for n in range(1, len(parts) + 1):
        name = ".".join(parts[:n])
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # ValueError: a module without a spec, such as __main__
            spec = None
        if spec is None or not _allowed(spec):
            places = ", ".join(_places(spec)) if spec is not None else ""
            raise ConfigError(
                f"{what}: the module {name!r} {f'lies in {places}' if places else 'is not there'}, and this "
                f"host allows a run only what lies in {', '.join(map(str, _policy.directories))}: put it "
                "there, or give its directory with --plugins-from"
            )
        try:
            importlib.import_module(name)
        except RAISED as error:  # a user's module may raise anything
            raise ConfigError(f"{what}: importing {name!r} failed: {error!r}") from error


def _refuse_foreign(what: str, function: object) -> None:
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    spec = getattr(home, "__spec__", None)
    if spec is None or not _allowed(spec):
        where = getattr(function, "__module__", None)
        raise ConfigError(
            f"{what} is imported there from {where!r}, which this host allows no run: write a function of "
            "your own in a directory given with --plugins-from"
        )


def _allowed(spec: ModuleSpec) -> bool:
    """Return whether the module lies in an allowed directory; links count as what they lead to."""
    roots = [directory.resolve() for directory in _policy.directories]
    places = [Path(place).resolve() for place in _places(spec)]
    return bool(places) and all(any(place.is_relative_to(root) for root in roots) for place in places)


def _places(spec: ModuleSpec) -> list[str]:
    if spec.has_location and spec.origin is not None:
        return [spec.origin]
    return list(spec.submodule_search_locations or ())


def _same_name_hint(module_name: str) -> str:
    """Return what to do where the working directory has a file or package of the same name as one of ours."""
    top = module_name.partition(".")[0]
    root = Path(__file__).parents[2]
    ours = root / "tests" / top if top in CHECKOUT_PACKAGES else root / top
    own = [path for path in (Path(f"{top}.py"), Path(top)) if path.exists()]
    if (
        top not in (*OWN_PACKAGES, *CHECKOUT_PACKAGES)
        or not ours.exists()
        or not own
        or own[0].resolve() == ours
    ):
        return ""
    return f": {top!r} is a package of Sluice, so {str(own[0])!r} here is not imported: rename it"


def _unknown(kind: str, name: str, builtins: Mapping[str, object]) -> str:
    return (
        f"no {kind} named {name!r}: {nearest(name, builtins)}built in are {', '.join(sorted(builtins))}; "
        "your own is written my_pkg.my_module:function"
    )
