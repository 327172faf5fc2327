"""Requests that show pictures, and the log-probs of what was sampled for them by transformers."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel

from actors.engines.base import Generation, GenerationRequest, Sampling
from storage.images.chat import ImageChat, inlined
from storage.images.reader import ImageReader


def asked(directory: Path, name: str, *parts, new: int = 9) -> GenerationRequest:
    """A request with the parts of one user's message, for the model in a directory.

    It ends with a token that stands for a patch: transformers would take that for an image."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = ImageChat.of(directory, tokenizer)
    [message], found = inlined([{"role": "user", "content": list(parts)}], chat)
    tokens, images = chat.expanded(tokenizer.encode(message["content"]), found)
    sampling = Sampling(max_new_tokens=new, stop_token_ids=tuple(sorted(chat.reader.shown_ids)))
    return GenerationRequest(name, tokens, sampling, images=images)


@torch.inference_mode()
def recomputed(
    model: PreTrainedModel, directory: Path, request: GenerationRequest, generation: Generation
) -> np.ndarray:
    """Log-probs of the sampled tokens by transformers' own forward over the whole sequence."""
    reader = ImageReader.of(directory)
    tokens = torch.tensor([[*request.token_ids, *generation.token_ids.tolist()[:-1]]])
    shown = {}
    if request.images:
        kinds = torch.zeros_like(tokens)
        for image in request.images:
            kinds[0, image.start : image.stop] = 1
        shown = {
            "pixel_values": torch.from_numpy(np.concatenate([reader.patches(one) for one in request.images])),
            "image_grid_thw": torch.tensor([reader.grid(one) for one in request.images]),
            "mm_token_type_ids": kinds,
        }
    shown = {name: tensor.to(model.device) for name, tensor in shown.items()}
    logits = model(input_ids=tokens.to(model.device), use_cache=False, **shown).logits[0].cpu().float()
    sampled = torch.from_numpy(generation.token_ids).long()
    behind = logits.log_softmax(-1)[len(request.token_ids) - 1 :]
    return behind.gather(1, sampled[:, None])[:, 0].numpy()
