"""A model of transformers whose output is the loss, sharded over all ranks by torch's FSDP2."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from bus.errors import ConfigError
from bus.images import PlacedImage, shown_tokens
from learner.backends.fsdp.attention import PackedSequences
from learner.backends.fsdp.build import LogitChange, attention_of, refusal
from learner.backends.fsdp.fused_modules import FusedModules, are_wanted
from learner.backends.fsdp.router_replay import RouterReplay
from learner.backends.fsdp.sglang_model import SglangArithmetic
from learner.backends.output.output_layer import TokenLoss
from learner.backends.output.policy_output import policy_output
from learner.backends.sglang_kernels.kernels import SglangKernels
from learner.backends.shared.rope_scaling import refuse_scaled, unscaled_tokens
from learner.backends.shared.score_head import is_reward_model
from learner.data.packing import MicroBatch, empty_micro_batch
from learner.distributed.process_group import device
from learner.host_memory.copies import to_device
from storage.exact_arithmetic.exact_model import make_exact
from storage.exact_arithmetic.self_check import refuse_other_arithmetic
from storage.images.positions import rope_positions
from storage.images.reader import ImageReader


class PackedVision:
    """Runs packs through a Qwen3-VL or Qwen2.5-VL, whose vision towers attend within each image, as
    transformers has it: the latter's in most layers within windows of it.

    The places of the tower's results among the tokens come with the pack, not from the ids of tokens: a
    policy may have sampled the token that stands for a patch, and meant no image by it."""

    def __init__(self, hf_model: PreTrainedModel, reader: ImageReader) -> None:
        self.reader = reader
        self._hf = hf_model

    def hidden(self, batch: MicroBatch, packed: PackedSequences) -> Tensor:
        """Return the last hidden states of the language model, [T, width].

        The tower is passed for a pack without images too, since each pass gathers every layer from all ranks;
        then nothing of it is used, and its gradient is zero."""
        embedded = self._hf.get_input_embeddings()(batch.tokens[None])
        features, *deepstack = self._features(batch.images, batch.tokens.device)
        shown = {}
        if batch.images:
            places = shown_tokens(len(batch.tokens), batch.images)
            at = to_device(torch.from_numpy(np.flatnonzero(places)), embedded.device)
            embedded = embedded.index_copy(1, at, features.to(embedded.dtype)[None])
            mask = to_device(torch.from_numpy(places), embedded.device)[None]
            shown = {"visual_pos_masks": mask, "deepstack_visual_embeds": deepstack} if deepstack else {}
        else:
            unused = torch.stack([each.sum() for each in (features, *deepstack)]).sum()
            embedded = embedded + 0.0 * unused.to(embedded.dtype)
        output = self._hf.get_decoder()(
            inputs_embeds=embedded,
            position_ids=self._positions(batch),
            use_cache=False,
            packed=packed,
            **shown,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def plain_inputs(
        self, images: Sequence[PlacedImage], length: int, device: torch.device
    ) -> Mapping[str, Tensor]:
        """Return what transformers' own forward pass of one sequence takes besides its tokens."""
        if not images:
            return {}
        kinds = torch.zeros((1, length), dtype=torch.long, device=device)
        for image in images:
            kinds[0, image.start : image.stop] = 1
        patches, grids = self._inputs(images, device)
        return {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": kinds}

    def _positions(self, batch: MicroBatch) -> Tensor:
        """Return the positions of all tokens, [3, 1, T], which begin anew in each sequence."""
        sequences = zip(batch.lengths, batch.images_apart, strict=True)
        positions = np.concatenate([rope_positions(*sequence) for sequence in sequences], axis=1)
        return to_device(torch.from_numpy(positions), batch.tokens.device)[:, None]

    def _features(self, images: Sequence[PlacedImage], device: torch.device) -> list[Tensor]:
        """Return what stands at the tokens of the images, one after the other, and what is added to each of
        the first layers there. The tower sees each image once, however many sequences show it."""
        distinct = list({image.digest: image for image in images}.values())
        found = self._hf.get_image_features(*self._inputs(distinct, device))
        layers = (found.pooler_output, *getattr(found, "deepstack_features", ()))
        if not images:
            return [of_images[0] for of_images in layers]
        number = {image.digest: n for n, image in enumerate(distinct)}
        return [torch.cat([of_images[number[image.digest]] for image in images]) for of_images in layers]

    def _inputs(self, images: Sequence[PlacedImage], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return patches and grids of images; those of a black one in place of none."""
        if not images:
            black = self.reader.smallest
            side = round(len(black) ** 0.5)
            return torch.from_numpy(black).to(device), torch.tensor([[1, side, side]], device=device)
        patches = np.concatenate([self.reader.patches(image) for image in images])
        grids = torch.tensor([self.reader.grid(image) for image in images])
        return to_device(torch.from_numpy(patches), device), to_device(grids, device)


OF_TRAINED = 4
"""Times the memory of a weight that its training takes: with its gradient and two moments of AdamW."""
PART_OF_ROOM = 1 / 8
"""Part of the memory beside training that rounded weights may take: the rest is for activations."""
log = structlog.get_logger()


class PackedModel(torch.nn.Module):
    """A causal language model over packed sequences, which may show images."""

    def __init__(
        self, hf_model: PreTrainedModel, *, exact: bool = False, images: ImageReader | None = None,
        kernels: SglangKernels | None = None,
    ) -> None:  # fmt: skip
        """With `exact`, have the model compute in exact arithmetic (storage/exact_arithmetic); with
        `kernels`, as a server of SGLang does. `images` are those of a vision-language model.

        Raises `ConfigError` for models that cannot."""
        super().__init__()
        self.hf = hf_model
        self.exact = exact
        self.vision = None if images is None else PackedVision(hf_model, images)
        self.scores = is_reward_model(hf_model.config)
        """The output is a score in place of each log-prob, and an entropy of 0."""
        self._logits = LogitChange.of(hf_model.config)
        if self._logits.changes and (exact or kernels is not None):
            raise ConfigError(refusal(["model.numerics: only `fast` has scaled or capped logits"]))
        self._unscaled_tokens = unscaled_tokens(hf_model.config)
        self.windows: set[int] = set()
        """Sliding windows, in tokens, that its layers have attended in."""
        self.fused: FusedModules | None = None
        """What is computed otherwise than transformers does; nothing where an engine's arithmetic is."""
        if are_wanted() and not exact and kernels is None:
            self.fused = FusedModules(hf_model)
        self.replay = RouterReplay(hf_model)
        self.sglang = None if kernels is None else SglangArithmetic(hf_model, kernels)
        if exact:
            refuse_other_arithmetic(device())
            make_exact(hf_model, partial(self._hidden, empty_micro_batch()))

    def forward(
        self, batch: MicroBatch, token_loss: TokenLoss | None = None, top: int = 0, *, plain: bool = False
    ) -> tuple[Tensor, ...]:
        """Return what `policy_output` does (learner/backends/output/policy_output.py).

        With `plain`, the float32 logits [T, V] of transformers' own forward pass on one sequence after
        another, to compare with."""
        if plain:
            return (self._plain_logits(batch),)
        hidden = self._hidden(batch)
        if self.scores:
            scores = self.hf.score(hidden.index_select(0, batch.predicting)).float().sum(-1)  # of one column
            return scores, torch.zeros_like(scores)
        weight = self.hf.get_output_embeddings().weight
        kernels = None if self.sglang is None else self.sglang.kernels
        if self._logits.factor != 1.0:
            hidden = hidden * self._logits.factor
        return policy_output(
            hidden, weight, batch, token_loss, top, exact=self.exact, kernels=kernels, cap=self._logits.cap
        )

    def _hidden(self, batch: MicroBatch) -> Tensor:
        self.replay.refuse_others(batch)
        refuse_scaled([batch], self._unscaled_tokens)
        packed = PackedSequences.of(batch, self.windows, exact=self.exact)
        if self.vision is not None:
            return self.vision.hidden(batch, packed)
        if self.sglang is not None:
            return self.sglang.hidden(self.hf, batch, packed)
        output = self.hf.get_decoder()(
            input_ids=batch.tokens[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            packed=packed,
        )
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    def _plain_logits(self, batch: MicroBatch) -> Tensor:
        self.hf.set_attn_implementation("eager")
        try:
            tower = self.vision
            sequences = zip(torch.split(batch.tokens, list(batch.lengths)), batch.images_apart, strict=True)
            inputs = [
                (each[None], {} if tower is None else tower.plain_inputs(shown, len(each), device()))
                for each, shown in sequences
            ]
            with nullcontext() if self.fused is None else self.fused.switched_off():
                passes = (
                    self._plain_pass(input_ids=each, use_cache=False, **shown) for each, shown in inputs
                )
                logits = [of_sequence[0] for of_sequence in passes]
        finally:
            self.hf.set_attn_implementation(attention_of(self.hf.config))
        return torch.cat(logits).float()

    def _plain_pass(self, **inputs: Any) -> Tensor:
        if not self.scores:
            return self.hf(**inputs).logits  # type: ignore[no-any-return]
        return self.hf.score(self.hf.get_decoder()(**inputs).last_hidden_state)  # type: ignore[no-any-return]

    def forget_gathered(self) -> None:
        """Have the next pass gather the parameters that it needs, which may have changed."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class ShardedModel(PackedModel, FSDPModule):
    """What `shard` makes of a model: its parameters are `DTensor`s, cut along their first dimension."""


def shard(
    hf_model: PreTrainedModel, *, dtype: torch.dtype, offload: bool, recompute: bool, exact: bool = False,
    images: ImageReader | None = None, kernels: SglangKernels | None = None,
) -> ShardedModel:  # fmt: skip
    """Divide the float32 parameters of a model, its main weights, among all ranks.

    Layers are gathered one at a time as `dtype`, in which they compute; the embedding, the output layer and
    what else lies beside the layers stay gathered during a pass. Gradients are added up in float32. A rank
    that is alone has nothing to gather: it rounds each layer once in a step, unless memory is to be saved or
    is short.

    Args:
        dtype: of activations.
        offload: the shards lie in the host's memory.
        recompute: the backward pass computes each layer again."""
    model = PackedModel(hf_model, exact=exact, images=images, kernels=kernels)
    place = device()
    mesh = init_device_mesh(place.type, (dist.get_world_size(),))
    offloading = CPUOffloadPolicy(pin_memory=place.type == "cuda") if offload else OffloadPolicy()
    rounded = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    alone = dist.get_world_size() == 1
    kept = alone and not offload and not recompute and _may_lie_twice(hf_model, dtype)
    shared: dict[str, Any] = {"mesh": mesh, "mp_policy": rounded, "offload_policy": offloading}
    for layer in _layers(hf_model):
        if recompute:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, reshard_after_forward=not kept, **shared)
    fully_shard(model, reshard_after_forward=False, **shared)  # each call moves buffers to the device
    for module in model.modules():
        if isinstance(module, FSDPModule):  # both settings are of one module, and not of those inside it
            # The loss of a step is a sum over ranks, which is divided by its denominator afterwards.
            if not alone:  # one rank would divide by 1
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_backward(not kept, recurse=False)
    return model  # type: ignore[return-value]  # `fully_shard` has changed its class


def _may_lie_twice(hf_model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Tell whether all weights may lie in memory as `dtype` too: none does already, and there is room."""
    weights = list(hf_model.parameters())
    if any(each.dtype == dtype for each in weights):
        return False
    needed = sum(each.nbytes * (OF_TRAINED if each.requires_grad else 1) for each in weights)
    rounded = sum(each.numel() * dtype.itemsize for each in weights)
    free = free_bytes()
    if rounded > PART_OF_ROOM * (free - needed):
        log.info("layers_rounded_for_each_pass", rounded_bytes=rounded, needed_bytes=needed, free_bytes=free)
        return False
    return True


def free_bytes() -> float:
    """Return the memory of the GPU that can be taken; infinity elsewhere, where no layer is large."""
    if device().type != "cuda":
        return math.inf
    of_torch = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + of_torch


def _layers(hf_model: PreTrainedModel) -> list[torch.nn.Module]:
    kinds = hf_model._no_split_modules or ()
    return [module for module in hf_model.modules() if type(module).__name__ in kinds]
