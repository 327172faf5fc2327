"""A tiny Qwen3 whose weights are chosen so that it reasons, calls a calculator and says that it is done.

Which token may follow which is fixed, a few of them each time; which one follows is drawn, and the odds
depend on the whole context, so that log-probs tell other weights, and another cache of keys and values."""

import math
from collections.abc import Mapping

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.actors.policy.families import QWEN3, tokenizer_of

BEGUN, DONE, END = '{"name": "calculator", "arguments": {"expression": "', "done", "<|im_end|>"
CLOSED = '*7"}}'
LETTERS, DIGITS = "abcdefgh", "123456789"
STATES = ("Ċ", *LETTERS, *DIGITS, "<think>", "</think>", "<tool_call>", BEGUN, CLOSED, "</tool_call>", DONE)
"""Tokens after which it knows what to say; a prompt ends with the first of them."""
HIDDEN = 64
ALLOWED_NATS = 20.0
"""Logit by which a token that may follow exceeds all others."""
LARGE = 4.0
"""Element of an embedding that says which token it is."""
QUIET = 0.1
"""Factor of what the context adds to the other elements."""
NORMED = 6.0
"""The same behind the last norm, roughly."""


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_of(QWEN3.replace("THINK", "true"), END)
    tokenizer.add_tokens([BEGUN, CLOSED, DONE])
    return tokenizer


TOKENIZER = _tokenizer()
END_ID = TOKENIZER.convert_tokens_to_ids(END)


def following(*, thought: float, called: float) -> Mapping[str, Mapping[str, float]]:
    """Return the odds of what may follow each token.

    Args:
        thought: chance that a reasoning ends with its present letter.
        called: chance that a call follows a reasoning; else it says that it is done."""
    letters = dict.fromkeys(LETTERS, (1 - thought) / len(LETTERS))
    return {
        "Ċ": {"<think>": 1.0},
        "<think>": dict.fromkeys(LETTERS, 1 / len(LETTERS)),
        **{letter: {**letters, "</think>": thought} for letter in LETTERS},
        "</think>": {"<tool_call>": called, DONE: 1 - called},
        "<tool_call>": {BEGUN: 1.0},
        BEGUN: {**dict.fromkeys(DIGITS, 0.1), "</tool_call>": 0.1},  # that is no call
        **{digit: {CLOSED: 1.0} for digit in DIGITS},
        CLOSED: {"</tool_call>": 1.0},
        "</tool_call>": {END: 1.0},
        DONE: {END: 1.0},
    }


def chat_model(seed: int, *, thought: float = 0.1, called: float = 0.7) -> Qwen3ForCausalLM:
    """Return a model with these odds; another `seed` has others around them."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(TOKENIZER), hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=END_ID, pad_token_id=None,
        architectures=["Qwen3ForCausalLM"], dtype="float32", initializer_range=0.2,
    )  # fmt: skip
    model = Qwen3ForCausalLM._from_config(config, dtype=torch.float32).eval()
    tables = following(thought=thought, called=called)
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight *= QUIET
                part.weight[: len(STATES)] = 0.0  # what these elements say of the latest token stays
        model.lm_head.weight[:, : len(STATES)] = 0.0
        for number, state in enumerate(STATES):
            embedded = model.model.embed_tokens.weight[TOKENIZER.convert_tokens_to_ids(state)]
            embedded.zero_()
            embedded[number] = LARGE
            for token, odds in tables[state].items():
                logit = ALLOWED_NATS + math.log(odds) if odds else 0.0
                model.lm_head.weight[TOKENIZER.convert_tokens_to_ids(token), number] = logit / NORMED
    return model
