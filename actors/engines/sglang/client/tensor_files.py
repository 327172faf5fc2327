"""Tensors on their way to a server: into files that it reads, and into the bodies of requests."""

import base64
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch

from storage.weights.tensors import TORCH_DTYPES, laid_out

NAMES = {getattr(torch, dtype): name for name, dtype in TORCH_DTYPES.items()}
FROM_TORCH = {"format": "pt"}
State = Mapping[str, torch.Tensor]
"""Tensors by Hugging Face name."""


def write_tensors(path: Path, state: State, metadata: Mapping[str, str] = FROM_TORCH) -> None:
    """Write a safetensors file of these tensors. Raises `OSError` where there is no room."""
    kinds = {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()}
    beginning, places = laid_out(kinds, metadata)
    with path.open("wb") as file:
        file.write(beginning)
        for name in places:  # not into a mapping: a full disk would kill us, by SIGBUS
            file.write(raw(state[name]).numpy().data)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes on the host, uint8 [bytes]; the same memory where it lies there whole."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8)


def bytes_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def on_host(state: State) -> dict[str, torch.Tensor]:
    """Return copies, without what else lies in the memory of each."""
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def pickled(tensors: list[tuple[str, torch.Tensor]] | dict[str, torch.Tensor]) -> str:
    """Return the form SGLang wants in bodies; its own reader lets nothing but tensors through."""
    return base64.b64encode(pickle.dumps(tensors)).decode()
