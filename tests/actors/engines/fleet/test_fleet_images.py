"""Prompts with images in a fleet: those with another image have another beginning."""

from actors.engines.base import GenerationRequest, Sampling
from actors.engines.fleet.fleet import Affinity
from actors.engines.fleet.pending_request import PendingRequest
from bus.images import PlacedImage, image_digest
from tests.pictures import picture

PAD = 9
TOKENS = [1, 2, *48 * [PAD], 3, *range(10, 42)]


def pending(*seeds: int) -> PendingRequest:
    """A request whose images differ by their seeds, after 32 tokens of text where there are several."""
    images, text = [], list(range(100, 132)) if len(seeds) > 1 else []
    tokens = [*text]
    for seed in seeds:
        data = picture(seed=seed)
        images.append(PlacedImage(image_digest(data), len(tokens) + 2, 6, 8, data))
        tokens += TOKENS
    return PendingRequest(0, GenerationRequest("r", tokens, Sampling(), images=tuple(images)))


def test_the_engine_that_saw_an_image_has_no_beginning_of_a_prompt_with_another():
    affinity = Affinity()
    affinity.note(pending(0).beginning, "e0")
    assert affinity.holder(pending(0).beginning) == "e0"
    assert pending(0).tokens.tolist() == pending(1).tokens.tolist()
    assert affinity.holder(pending(1).beginning) is None
    affinity.note(pending(2, 3).beginning, "e1")
    affinity.note(pending(2, 4).beginning, "e2")
    assert affinity.holder(pending(2, 3).beginning) == "e1"
    assert affinity.holder(pending(5, 3).beginning) == "e2"  # the text before its first image


def test_a_prompt_without_images_begins_with_its_tokens():
    plain = PendingRequest(0, GenerationRequest("r", TOKENS, Sampling()))
    assert plain.beginning.tolist() == TOKENS
