"""Which tensors the safetensors files of a model directory have, without reading one."""

import json
from collections.abc import Mapping, Set
from pathlib import Path

INDEX = "model.safetensors.index.json"


def weight_files(model: Path) -> dict[str, set[str]]:
    """Return the names of a model's files of weights, each with the tensors that the index says are in it;
    without an index with none.

    Raises `OSError` or `ValueError` where there are no files, or the index is none."""
    if not (model / INDEX).exists():
        files = sorted(file.name for file in model.glob("*.safetensors"))
        if not files:
            raise ValueError("there are no safetensors files")
        return {name: set() for name in files}
    index = json.loads((model / INDEX).read_text())
    files_by_tensor = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files_by_tensor, dict):
        raise ValueError(f"{INDEX} has no weight_map, which names the file of each tensor")  # noqa: TRY004 - of a file
    wanted: dict[str, set[str]] = {}
    for tensor, name in files_by_tensor.items():
        wanted.setdefault(str(name), set()).add(tensor)
    return wanted


def tensors_in(file: Path) -> set[str]:
    """Return the names of the tensors in a file. Raises `ValueError` for one that is not whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            return set(opened.keys())
    except SafetensorError as error:
        raise ValueError(f"{file.name} is damaged ({error})") from error


def all_tensors(model: Path) -> Set[str]:
    """Return the names of all tensors of a model, by the index where there is one.

    Raises as `weight_files` and `tensors_in`."""
    files: Mapping[str, set[str]] = weight_files(model)
    return set().union(*(tensors or tensors_in(model / name) for name, tensors in files.items()))
