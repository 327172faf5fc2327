"""Makes the table of versions in docs/gpu-host.md: which tests of the learner pass with SGLang's pins.

`PYTHONPATH=tests python -m versions 0.5.23 0.5.22 0.5.21` reads what each release of SGLang pins from the
package index. For every transformers among the pins it installs that beside this environment, without its
dependencies, and runs the tests of the rooms that use transformers most. It prints the table, and after it
the tests that failed."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
ROOMS = (
    "tests/learner/backends", "tests/learner/convert", "tests/learner/initial",
    "tests/learner/model_directories", "tests/actors/engines/embedded",
)  # fmt: skip
BESIDE = ("transformers", "tokenizers", "huggingface-hub")
"""Packages that a release of SGLang has otherwise than this environment, and that run without a rebuild."""
REFUSAL = re.compile(r"needs transformers \S+ or later|by transformers \S+ and later|version of transformers")
"""What says that the installed transformers is too old for a model or a setting."""
LIMIT_S = 1500


@dataclass(frozen=True)
class Outcome:
    """What became of the tests with one transformers."""

    passed: int
    refused: tuple[str, ...]
    """Tests of what is refused by name with this version."""
    failed: tuple[str, ...]


def pins(release: str) -> dict[str, str]:
    """Return the version of each package that is installed with a release of SGLang on Linux."""
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-annotate", "--no-header",
        "--prerelease", "allow", "--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_34",
    ]  # fmt: skip
    ran = subprocess.run(
        command, input=f"sglang=={release}", capture_output=True, text=True, timeout=300, check=False
    )
    if ran.returncode:
        raise SystemExit(f"sglang=={release} cannot be resolved: {ran.stderr.strip()}")
    return dict(line.split("==") for line in ran.stdout.split() if "==" in line)


def run_tests(pinned: dict[str, str]) -> Outcome:
    """Run the tests with the pins of `BESIDE` in front of this environment's packages."""
    with tempfile.TemporaryDirectory() as directory:
        packages, report = Path(directory, "packages"), Path(directory, "report.xml")
        wanted = [f"{name}=={pinned[name]}" for name in BESIDE]
        install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "--target", str(packages), *wanted], check=True, timeout=300)
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}", *ROOMS],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(packages)}, stdout=subprocess.DEVNULL,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        return outcome(report)


def outcome(report: Path) -> Outcome:
    """Read what pytest wrote. A test is refused whose error says that transformers is too old."""
    passed, refused, failed = 0, [], []
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [part for part in case if part.tag in ("failure", "error")]
        if not problems:
            passed += case.find("skipped") is None
            continue
        said = "".join(part.get("message", "") + (part.text or "") for part in problems)
        (refused if REFUSAL.search(said) else failed).append(f"{case.get('classname')}::{case.get('name')}")
    return Outcome(passed, tuple(refused), tuple(failed))


def main(releases: Sequence[str]) -> None:
    """Print the table of these releases of SGLang, and the tests that failed."""
    found = {release: pins(release) for release in releases}
    by_transformers = {pinned["transformers"]: pinned for pinned in found.values()}
    outcomes = {transformers: run_tests(pinned) for transformers, pinned in by_transformers.items()}
    lines = ["| SGLang | torch | transformers | megatron-core | passed | refused by name | failed |"]
    lines.append("|---|---|---|---|---|---|---|")
    for release, pinned in found.items():
        of, core = outcomes[pinned["transformers"]], version("megatron-core")
        numbers = f"{of.passed} | {len(of.refused)} | {len(of.failed)}"
        lines.append(f"| {release} | {pinned['torch']} | {pinned['transformers']} | {core} | {numbers} |")
    for transformers, one in outcomes.items():
        lines += [f"refused by {transformers}: {name}" for name in one.refused]
        lines += [f"failed with {transformers}: {name}" for name in one.failed]
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
