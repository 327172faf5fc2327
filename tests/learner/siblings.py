"""Random trajectories that begin alike: siblings of a prompt, and strands that leave them at some turn."""

import numpy as np

from learner.data.packing import Sample
from tests.learner.tiny import VOCAB

PROMPT, TURN = 40, 36
"""Tokens of a prompt, and of a turn that strands share: more than it takes to be worth a segment."""


def siblings(
    *,
    seed: int = 0,
    prompts: int = 2,
    answers: int = 3,
    strands: int = 2,
    temperatures: tuple[float, ...] = (0.5, 0.8, 2.0),
) -> list[Sample]:
    """Samples of several prompts, prompt by prompt.

    Each prompt has some answers, strands that share a trained turn, one strand that ends with it and one that
    goes on after the first strand. Streams and weights differ, also where tokens are shared."""
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(prompts):
        prompt, turn = rng.integers(0, VOCAB, PROMPT), rng.integers(0, VOCAB, TURN)
        texts = [np.append(prompt, some_tokens(rng, 4, 20)) for _ in range(answers)]
        texts += [np.concatenate((prompt, turn, some_tokens(rng, 4, 40))) for _ in range(strands)]
        texts += [np.append(prompt, turn), np.append(texts[-1], some_tokens(rng, 4, 20))]
        samples += [sample_of(rng, text, number, temperatures) for text in texts]
    return samples


def some_tokens(rng: np.random.Generator, least: int, most: int) -> np.ndarray:
    return rng.integers(0, VOCAB, rng.integers(least, most))


def sample_of(
    rng: np.random.Generator, text: np.ndarray, prompt: int, temperatures: tuple[float, ...]
) -> Sample:
    length = len(text)
    return Sample(
        token_ids=text.astype(np.int32),
        loss_mask=(np.arange(length) >= PROMPT) & (rng.random(length) < 0.8),
        streams={
            "behaviour_logprobs": (-np.log(VOCAB) + rng.normal(0, 0.5, length)).astype(np.float32),
            "policy_versions": rng.choice((1, 3), length).astype(np.int32),
            "advantages": rng.normal(0, 1, length).astype(np.float32),
            "temperatures": rng.choice(temperatures, length).astype(np.float32),
            "loss_weights": float(rng.uniform(0.5, 2.0)),
            "group_weights": 0.5 + prompt / 2,
        },
        group=prompt,
    )
