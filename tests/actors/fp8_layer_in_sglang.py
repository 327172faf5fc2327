"""Runs in SGLang's environment: loads the projections of a file as its fused layer does, and says whether it
has what the file has."""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler


def main(directory: Path, store: str) -> None:
    """Print whether the layer's codes and scales are those of the file, one after another."""
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(directory), device="cpu"))
    parallel_state.init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=store
    )
    parallel_state.initialize_model_parallel()
    config = json.loads((directory / "config.json").read_text())
    quantisation = Fp8Config.from_config(config["quantization_config"])
    prefix = "model.layers.0.self_attn."
    layer = QKVParallelLinear(
        256, 64, 4, 2, bias=False, quant_config=quantisation, prefix=f"{prefix}qkv_proj",
        params_dtype=torch.bfloat16,
    )  # fmt: skip
    parameters = dict(layer.named_parameters())
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        shard, kind = name.removeprefix(prefix).split("_proj.")
        parameters[kind].weight_loader(parameters[kind], tensor, shard)
    for kind, parameter in parameters.items():
        parts = [tensors[f"{prefix}{shard}_proj.{kind}"] for shard in "qkv"]
        found, wanted = parameter.data.reshape(-1), torch.cat([part.reshape(-1) for part in parts])
        same = torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        sys.stdout.write(f"{kind} {same}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # what SGLang has begun need not end
