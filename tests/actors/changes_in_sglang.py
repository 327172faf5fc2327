"""Runs in SGLang's environment: gives models of SGLang changes of their weights, and others of the same kind
all weights, and says for each directory which parameters differ since."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import sluice_changes
import torch
from safetensors.torch import load_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler import SpawnRanks
from sglang.srt.model_loader import get_model
from sglang.srt.model_loader.loader import DefaultModelLoader, post_load_weights
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs

CPU = torch.device("cpu")


def published(directory: Path, settings: dict[str, Any]) -> ServerArgs:
    """Return a server's settings, which this process has from now on."""
    args = ServerArgs(
        model_path=str(directory), device="cpu", dtype="bfloat16", skip_tokenizer_init=True, **settings
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    return args


def loaded(args: ServerArgs) -> Any:
    """Return a model with the weights of its directory."""
    return get_model(
        model_config=ModelConfig.from_server_args(args),
        load_config=LoadConfig(),
        device_config=DeviceConfig("cpu"),
    )


def updated(model: Any, load: Callable[[], object]) -> dict[str, torch.Tensor]:
    """Update it as a server does, and return what it has then."""
    DefaultModelLoader.restore_weights_before_loading(model, CPU)
    load()
    post_load_weights(model)
    DefaultModelLoader.postprocess_weights(model, CPU)
    return held(model)


def held(model: Any) -> dict[str, torch.Tensor]:
    """Return all that it computes with."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def differing(directory: Path, settings: dict[str, Any]) -> dict[str, list[str]]:
    """Return what differs between the two ways after two versions, what either changed, and the tensors of
    the second one that the model itself had to load."""
    args = published(directory, settings)
    first = {name: tensor.clone() for name, tensor in held(loaded(args)).items()}
    whole, some = loaded(args), loaded(args)
    wanted = updated(whole, lambda: whole.load_weights(list(load_file(directory / "later").items())))
    updated(some, lambda: apply(some, directory / "changes"))
    by_model = loads_noted(some)
    sluice_changes._places_of(some).prepare(some, directory / "changes-2")
    found = updated(some, lambda: apply(some, directory / "changes-2"))
    return {
        "differ": list(other_bits(found, wanted)),
        "changed": list(other_bits(first, wanted)),
        "by_model": by_model,
    }


def apply(model: Any, file: Path) -> None:
    """Have a model take changes as a server does."""
    path = torch.frombuffer(bytearray(str(file).encode()), dtype=torch.uint8)
    sluice_changes.apply_2(model, [("path", path)])


def loads_noted(model: Any) -> list[str]:
    """Return a list that will have the names of the tensors that the model is given to load."""
    names: list[str] = []
    load = model.load_weights

    def noting(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        return load((names.append(name), (name, tensor))[1] for name, tensor in weights)

    model.load_weights = noting
    return names


def other_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> Iterator[str]:
    """Yield the names of tensors that are not the same to the bit."""
    for name, tensor in one.items():
        pair = (each.contiguous().view(torch.uint8) for each in (tensor, other[name]))
        if not torch.equal(*pair):
            yield name


def main(root: Path, settings: dict[str, dict[str, Any]]) -> None:
    """Print a line of JSON for each directory below `root` that has settings."""
    published(root / next(iter(settings)), next(iter(settings.values())))
    store = f"file://{root}/store"
    parallel_state.init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=store
    )
    parallel_state.initialize_model_parallel()
    for name, own in settings.items():
        sys.stdout.write(json.dumps({"family": name, **differing(root / name, own)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    os._exit(0)  # what SGLang has begun need not end
