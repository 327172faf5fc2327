"""What a GPU host installs can be had together: both environments are resolved against PyPI."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SGLANG = Path("actors/engines/sglang/gpu/requirements.txt")
UNREACHABLE = re.compile(r"failed to fetch|error sending request|dns error|timed? ?out", re.IGNORECASE)


def resolved(*of: str) -> dict[str, str]:
    """Return the version of each package that pip would install on Linux with glibc 2.34."""
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header",
        "--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_34", *of,
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, check=False)
    if UNREACHABLE.search(ran.stderr):
        pytest.skip(f"PyPI cannot be reached: {ran.stderr.strip()[-200:]}")
    assert ran.returncode == 0, ran.stderr
    return dict(line.split("==") for line in ran.stdout.split() if "==" in line)


@pytest.mark.slow
def test_both_environments_of_a_gpu_host_can_be_had():
    server = resolved(str(SGLANG))
    [pinned] = re.findall(r"^sglang==(\S+)$", (ROOT / SGLANG).read_text(), re.MULTILINE)
    assert server["sglang"] == pinned
    assert "nvidia-cuda-runtime" in server
    learner = resolved("pyproject.toml", "--extra", "gguf")
    assert {"torch", "megatron-core", "gguf", "nvidia-cuda-runtime"} <= learner.keys()
    page = (ROOT / "docs/gpu-host.md").read_text()
    assert f"sglang=={pinned}" in page
