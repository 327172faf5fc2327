"""Chats that are told again, as hypothesis draws them."""

import json
from dataclasses import dataclass

from hypothesis import Phase
from hypothesis import strategies as st

from tests.actors.policy.families import FAMILIES, Family

WORDS = st.text("abcer \né.", min_size=1, max_size=6).filter(lambda text: text.strip())
ARGUMENTS = st.dictionaries(st.sampled_from("ab"), st.integers(0, 99), min_size=1)


@dataclass(frozen=True)
class Answer:
    """What the engine is to answer, and how it is split into tokens."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, dict], ...] = ()
    malformed: str = ""
    ended: bool = True
    by_byte: bool = False

    def text(self, family: Family) -> str:
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        calls = family.write_calls(self.calls) if self.calls else ""
        return thought + self.content + calls + self.malformed


@st.composite
def answers(draw, family: Family) -> Answer:
    kind = draw(st.sampled_from(("text", "calls", "malformed")))
    most = 2 if family.several_calls else 1
    calls = st.lists(st.tuples(st.sampled_from(("add", "sub")), ARGUMENTS), min_size=1, max_size=most)
    bare = family is FAMILIES["llama3"]  # its calls have no text before them
    return Answer(
        content="" if kind != "text" and bare else draw(WORDS),
        reasoning=draw(st.sampled_from(("", "", "ab", "so\nc"))),
        calls=tuple(draw(calls)) if kind == "calls" else (),
        malformed=family.write_calls([("add", {"a": 1})])[:-4] if kind == "malformed" else "",
        ended=draw(st.booleans()),
        by_byte=draw(st.booleans()),
    )


def sampled(answer: Answer, family: Family, end: str) -> list[int]:
    """Tokenise an answer as the tokenizer does, or byte for byte, as no tokenizer would."""
    encode = family.tokenizer.encode
    tokens = encode(answer.text(family), add_special_tokens=False)
    if answer.by_byte:
        pieces = (family.tokenizer.decode([token]) for token in tokens)
        tokens = [
            token
            for piece, whole in zip(pieces, tokens, strict=True)
            for token in (encode(piece[0]) + encode(piece[1:]) if piece in ("ab", "abc", "er") else [whole])
        ]
    return [*tokens, *encode(end)] if answer.ended else tokens


def retold(message: dict, way: str, text: str | None) -> dict:
    """Repeat a message as clients do; `text` is all that the policy wrote, if it is an answer."""
    if way == "text" and text is not None:
        return {"role": "assistant", "content": text}
    if way == "without reasoning":
        return {key: value for key, value in message.items() if key != "reasoning_content"}
    if way == "otherwise":
        calls = [
            {**call, "function": {**call["function"], "arguments": otherwise(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        content = [{"type": "text", "text": message["content"]}] if message["content"] else None
        return {"refusal": None, **message, "content": content, **({"tool_calls": calls} if calls else {})}
    return message


def otherwise(arguments: str) -> str:
    return json.dumps(json.loads(arguments), indent=1, sort_keys=True)


UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
"""Examples are small enough to be read as they are drawn; to shrink one takes minutes of event loops."""
