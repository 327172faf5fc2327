"""Runs a module of Sluice as a process: `python -P bus/process/run_module.py MODULE [ARGUMENTS]`.

`python -m launch` would run a user's own `launch.py` instead where that is found first: in the working
directory, or in one that PYTHONPATH names. So this is started by its path, and imports nothing of ours by
name."""

import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

SEARCH = Path(__file__).parents[2] / "launch" / "process" / "own_packages.py"


def main() -> None:
    """Run the module that the first argument names, with the others."""
    spec = spec_from_file_location("sluice_own_packages", SEARCH)
    assert spec is not None
    assert spec.loader is not None
    own_packages = module_from_spec(spec)
    spec.loader.exec_module(own_packages)
    own_packages.search_own_packages_first()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
