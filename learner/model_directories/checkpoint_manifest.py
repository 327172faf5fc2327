"""Manifest of a checkpoint: its model, where training stood, and a digest of every file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from xxhash import xxh3_128

from bus.errors import ConfigError, LostDataError, StorageError
from bus.process.work_progress import Advance, long_work, uncounted
from learner.config.lora import LoraConfig
from storage.disk.atomic_files import write_json

MANIFEST = "manifest.json"
ADAPTERS = "adapters"
"""Directory in that of a model with the checkpoint of adapters that go on from another run."""
FORMAT = 2
READ_BYTES = 1 << 20


def write_manifest(
    directory: Path,
    *,
    model: Mapping[str, JsonValue],
    training: Mapping[str, JsonValue] | None,
    extra: Mapping[str, JsonValue],
    digests: Mapping[str, str],
) -> None:
    """Describe what lies in `directory`.

    Args:
        directory: of the checkpoint, everything else in it is complete.
        model: its hyperparameters that decide which weights fit (`Backend.fingerprint`).
        training: where the backend stands; `None` where there are weights only.
        extra: what the caller wants kept.
        digests: of files whose digest is known already; the others are read."""
    files = {
        path.name: {"bytes": path.stat().st_size, "xxh3_128": digests.get(path.name) or file_digest(path)}
        for path in sorted(directory.iterdir())
    }
    manifest = {
        "format": FORMAT,
        "model": dict(model),
        "training": training,
        "extra": dict(extra),
        "files": files,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def amend_manifest(directory: Path, extra: Mapping[str, JsonValue]) -> None:
    """Replace what the caller of a published checkpoint wants kept with it, at once and durably."""
    write_json(directory / MANIFEST, read_manifest(directory) | {"extra": dict(extra)})


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest, and check that all files exist with their sizes.

    Raises `LostDataError` when something is missing or torn, `ConfigError` for another format, and
    `StorageError` when the disk does not read."""
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
        version, files = manifest.get("format"), manifest["files"].items()
    except (FileNotFoundError, ValueError, KeyError, AttributeError) as error:
        raise LostDataError(
            f"{directory} is not a whole checkpoint: {MANIFEST} is missing or garbled ({error!r})"
        ) from error
    except OSError as error:
        raise StorageError(f"cannot read {directory}: {error}") from error
    if version != FORMAT:
        raise ConfigError(f"checkpoint {directory} has format {version}, this build reads {FORMAT}")
    for name, file in files:
        path = directory / name
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            raise LostDataError(
                f"checkpoint {directory} is torn: {name} is missing or not {file['bytes']} bytes long"
            )
    return manifest


def damaged_files(directory: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Read the files `names`, and return those whose bytes are not what was written."""
    files, share = manifest["files"], list(names)
    total = sum(files[name]["bytes"] for name in share)
    with long_work(f"reading {directory} to see that it is whole", total) as read:
        return [name for name in share if file_digest(directory / name, read) != files[name]["xxh3_128"]]


def refuse_damage(directory: Path, damaged: Iterable[str]) -> None:
    """Raise `LostDataError` when there are damaged files."""
    if names := ", ".join(sorted(damaged)):
        raise LostDataError(
            f"checkpoint {directory} is damaged: the bytes of {names} are not those that were written; "
            "remove it to go on from the one before"
        )


def refuse_other_model(directory: Path, different: Sequence[str]) -> None:
    if different:
        raise ConfigError(f"checkpoint {directory} is of another model: {', '.join(different)}")


def written_by(manifest: Mapping[str, Any]) -> str:
    """Return which backend wrote a checkpoint; those of weights only are Megatron's."""
    return str((manifest["training"] or {}).get("backend", "megatron"))


def is_written_by(backend: str, directory: Path) -> bool:
    """Tell whether a checkpoint has a manifest that says so, whatever else is missing there."""
    path = directory / MANIFEST
    if not path.is_file():
        return False
    try:
        return written_by(json.loads(path.read_text())) == backend
    except (ValueError, KeyError, AttributeError) as error:
        raise LostDataError(f"{path} is garbled ({error!r})") from error


def adapters_in(manifest: Mapping[str, Any]) -> LoraConfig:
    """Return the settings of the adapters that a checkpoint has instead of weights; of rank 0 without."""
    saved = (manifest["training"] or {}).get("lora") or {}
    return LoraConfig.model_validate({name: value for name, value in saved.items() if name != "base"})


def adapters_go_on(checkpoint: Path, backend: str, lora: LoraConfig, *, gives_scores: bool) -> bool:
    """Tell whether a run with these settings goes on with the adapters of a checkpoint. A reward model does
    not with those of a policy, which lack its head."""
    manifest = read_manifest(checkpoint)
    if not lora.exists or written_by(manifest) != backend or not adapters_in(manifest).is_as(lora):
        return False
    forms = json.loads((checkpoint / "config.json").read_text()).get("architectures") or ()
    return gives_scores == any(form.endswith("ForSequenceClassification") for form in forms)


def adapters_beside(model: Path) -> Path | None:
    """Return the checkpoint of adapters with which a run begins beside the weights of a model directory."""
    found = model / ADAPTERS
    return found if found.is_dir() else None


def differences(found: Mapping[str, JsonValue], wanted: Mapping[str, JsonValue]) -> list[str]:
    """List, for people, the hyperparameters by which weights of `found` do not fit a model of `wanted`."""
    other = [key for key in wanted if found.get(key) != wanted[key]]
    return [f"{key} is {found.get(key)}, not {wanted[key]}" for key in other]


def file_digest(path: Path, read: Advance = uncounted) -> str:
    """Return the xxh3-128 digest of a file, in hexadecimal; `read` is called with each number of bytes."""
    digest = xxh3_128()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            read(len(block))
    return digest.hexdigest()
