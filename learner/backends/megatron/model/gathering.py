"""Weights that are gathered while earlier layers compute (`learner.parallel.overlap_param_gather`)."""

import torch


def finish_gathering(layer: torch.nn.Module) -> None:
    """Wait for the updated weights of `layer`, as megatron-core's hooks do when a layer is called.

    It is for a layer that is not called. Without the wait it would compute with weights of before the update,
    and its gather would outlive the pass and replace the next one."""
    for hook in layer._forward_pre_hooks.values():
        hook(layer, ())
