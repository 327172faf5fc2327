"""The text of each token of a trajectory."""

from collections.abc import Callable, Sequence
from pathlib import Path

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_PIECE = 12
"""Tokens that one character may be made of; what still does not decode then is shown as it is."""
Decode = Callable[[Sequence[int]], str]


def has_tokenizer(model: Path) -> bool:
    return any((model / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def decoder(model: Path) -> Decode:
    """Return what turns token ids into text, by the tokenizer in a model directory. Ids stand for themselves
    where there is no tokenizer."""
    if (model / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    if (model / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer  # takes seconds to load

        other = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        return lambda ids: str(other.decode(list(ids)))
    return lambda ids: "".join(f"[{token}]" for token in ids)


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return one text a token, which joined are the text of all. Decoding tokens one by one would lose
    spaces, and characters that several tokens make. So each is what the tokens up to it add to those before;
    a character of several tokens belongs to the last of them."""
    texts: list[str] = []
    begin = done = 0  # tokens [begin, done) are decoded again as context, those after are not given out yet
    for end in range(1, len(ids) + 1):
        before, after = decode(ids[begin:done]), decode(ids[begin:end])
        waits = after.endswith(REPLACEMENT) and end - done < LONGEST_PIECE and end < len(ids)
        if waits or len(after) <= len(before):
            texts.append("")
        else:
            texts.append(after[len(before) :])
            begin, done = done, end
    return texts
