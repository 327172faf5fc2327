"""Sluice's own packages are found before a user's files of the same names."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = str(Path(__file__).parents[2])
"""The directory that holds Sluice's packages."""
# bus/process/plugins.py has this list too. It is not imported here, where a user's bus.py would be found.
PACKAGES = ("actors", "bus", "launch", "learner", "storage")
CHECKOUT = str(Path(ROOT, "tests"))
"""The directory of the packages that only a checkout has."""
CHECKOUT_PACKAGES = ("benchmarks", "soak")


class _OwnPackagesFinder(MetaPathFinder):
    """Finds Sluice's packages in `ROOT` and `CHECKOUT`, whatever directory `sys.path` names first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in CHECKOUT_PACKAGES:
            return PathFinder.find_spec(name, [CHECKOUT], target)
        return PathFinder.find_spec(name, [ROOT], target) if name in PACKAGES else None


def find_own_packages_first() -> None:
    """Have this process find Sluice's packages before others of their names."""
    if not any(isinstance(finder, _OwnPackagesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OwnPackagesFinder())


def search_own_packages_first() -> None:
    """Have this process find Sluice's packages first and the files of the working directory last. `python -m`
    searches the working directory before all else and PYTHONPATH may name it too, so that a user's own
    `storage.py` beside the prompts would take the place of ours."""
    find_own_packages_first()
    here = str(Path.cwd())
    if sys.path[0] in ("", here):
        sys.path.append(sys.path.pop(0))
