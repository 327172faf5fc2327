"""Applies each mutation of mutations.py to a copy of the code and says which test catches it.

Run it by `make mutants`; `make mutants ONLY=lineage` tries those whose names contain that word.
Its exit status is 1 if a mutation survives, and 2 if the text that one replaces is not in the code any more.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900.0
"""Seconds that the tests of a mutation may take."""


def copied(target: Path) -> None:
    """Copy the files that git knows, as they are in the working tree."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in names.stdout.splitlines():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def caught(copy: Path, mutation: Mutation) -> str | None:
    """Return the test that fails with the mutation, and None if all of its tests pass."""
    command = [sys.executable, "-m", "pytest", "-qx", "-m", "not nightly and not gpu and not sglang"]
    command += ["-p", "no:cacheprovider", "-p", "no:randomly", *mutation.tests]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        run = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        sys.exit(
            f"{mutation.name}: its tests did not end within {TIMEOUT_S:.0f} s: try it on a quiet machine"
        )
    if run.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    if run.returncode != 1 or found is None:
        sys.exit(f"{mutation.name}: pytest ended with {run.returncode}\n{run.stdout}\n{run.stderr}")
    return found[1]


def main(only: list[str]) -> int:
    chosen = [one for one in MUTATIONS if not only or any(part in one.name for part in only)]
    survivors = 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        copied(copy)
        for mutation in chosen:
            file = copy / mutation.file
            code = file.read_text()
            if code.count(mutation.before) != 1:
                sys.stderr.write(
                    f"{mutation.name}: {mutation.file} has {code.count(mutation.before)} times\n"
                    f"{mutation.before}\nexactly 1 is to be replaced: mend tests/mutants/mutations.py\n"
                )
                return 2
            file.write_text(code.replace(mutation.before, mutation.after))
            test = caught(copy, mutation)
            file.write_text(code)
            survivors += test is None
            sys.stdout.write(f"{'SURVIVES' if test is None else 'caught'}  {mutation.name}  {test or ''}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen)} mutations, {survivors} of them survive\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
