"""Images in packs: the vision tower, and its results at the places of the tokens that stand for images.

The places come with the pack, not from the ids of tokens: a policy may have sampled the token that stands for
a patch, and meant no image by it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bus.images import PlacedImage, shown_tokens
from learner.backends.fsdp.attention import PackedSequences
from learner.data.packing import MicroBatch
from learner.host_memory.copies import to_device
from storage.images.positions import rope_positions
from storage.images.reader import ImageReader


class PackedVision:
    """Runs packs through a Qwen3-VL or Qwen2.5-VL, whose vision towers attend within each image, as
    transformers has it: the latter's in most layers within windows of it."""

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
