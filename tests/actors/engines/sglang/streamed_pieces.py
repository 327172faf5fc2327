"""Pieces of an answer as SGLang streams them."""

from actors.engines.sglang.client.weight_labels import weights_label


def piece(begin: int, end: int, **meta) -> dict[str, object]:
    """Tokens begin to end of the sequence 100, 101, ..., as 0.5.23 streams them."""
    pairs = [[-token / 10, 100 + token, None] for token in range(begin, end)]
    said = {"finish_reason": None, "completion_tokens": end, "output_token_logprobs": pairs, **meta}
    return {"output_ids": list(range(100 + begin, 100 + end)), "meta_info": said}


END = {
    "finish_reason": {"type": "length"},
    "weight_versions": [
        {"version": weights_label(7), "start": 0, "end": 3},
        {"version": weights_label(8), "start": 3, "end": 6},
    ],
}
