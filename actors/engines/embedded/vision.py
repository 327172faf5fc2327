"""Prompts with images through a Qwen3-VL or Qwen2.5-VL: its vision tower, and the places of the results among
the tokens.

The places come with the request, not from the ids of tokens: a policy may sample the token that stands for a
patch, and means no image by it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from bus.images import PlacedImage, shown_tokens
from storage.images.positions import rope_positions
from storage.images.reader import ImageReader


class VisionPrefill:
    """Fills a cache with prompts that show images."""

    def __init__(self, model: PreTrainedModel, reader: ImageReader) -> None:
        self._model = model
        self._reader = reader

    def logits(
        self,
        tokens: Tensor,
        images: Sequence[Sequence[PlacedImage]],
        needed: Tensor,
        cache: Mapping[str, Cache],
    ) -> Tensor:
        """Return the logits behind the `needed` tokens of each row, [m, needed, V].

        Args:
            tokens: int64 [m, longest], padded on the right.
            images: those of each row.
            needed: int64, numbers of tokens.
            cache: what the forward pass fills, by the name that the model has for it.
        """
        embedded = self._model.get_input_embeddings()(tokens)
        places = torch.from_numpy(np.stack([shown_tokens(tokens.shape[1], shown) for shown in images]))
        places = places.to(tokens.device)
        features, *deepstack = self._features([image for shown in images for image in shown], tokens.device)
        embedded[places] = features.to(embedded.dtype)
        positions = np.stack([rope_positions(tokens.shape[1], shown) for shown in images], axis=1)
        hidden = self._model.get_decoder()(
            inputs_embeds=embedded,
            position_ids=torch.from_numpy(positions).to(tokens.device),
            use_cache=True,
            **({"visual_pos_masks": places, "deepstack_visual_embeds": deepstack} if deepstack else {}),
            **cache,
        ).last_hidden_state
        logits: Tensor = self._model.get_output_embeddings()(hidden[:, needed])
        return logits

    def _features(self, images: Sequence[PlacedImage], device: torch.device) -> list[Tensor]:
        """Return what stands at the tokens of the images, one after the other, and what is added to each of
        the first layers there; the tower sees each image once."""
        distinct = list({image.digest: image for image in images}.values())
        patches = np.concatenate([self._reader.patches(image) for image in distinct])
        grids = torch.tensor([self._reader.grid(image) for image in distinct])
        found = self._model.get_image_features(torch.from_numpy(patches).to(device), grids.to(device))
        number = {image.digest: n for n, image in enumerate(distinct)}
        return [
            torch.cat([of_images[number[image.digest]] for image in images])
            for of_images in (found.pooler_output, *getattr(found, "deepstack_features", ()))
        ]
