"""Prompts of the recipe `instructions`: a sentence on a topic, written as IFEval's instructions say."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bus.config import Json
from launch.recipes.prompt_files import PromptFiles, PromptRow

TOPICS = (
    "apples", "bees", "birds", "boats", "books", "bread", "bridges", "cats", "cheese", "clocks", "clouds",
    "coffee", "cows", "dogs", "dreams", "farms", "fire", "fish", "flowers", "forests", "friends", "games",
    "gold", "grass", "hats", "honey", "horses", "ice", "islands", "kings", "lakes", "letters", "light",
    "milk", "money", "music", "night", "oceans", "paper", "rain", "roads", "salt", "sand", "schools",
    "ships", "shoes", "silk", "snow", "songs", "stones", "storms", "sugar", "tea", "time", "towns",
    "toys", "trees", "water", "wind", "wool",
)  # fmt: skip
HELD_OUT_TOPICS = (
    "ants", "bells", "candles", "deserts", "doors", "dragons", "gardens", "glass", "hills", "keys",
    "lamps", "lemons", "lions", "maps", "markets", "mirrors", "mountains", "nuts", "plants", "rivers",
    "spices", "stars", "trains", "windows", "winter", "wolves",
)  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """An instruction, which a program verifies."""

    kind: str
    """IFEval's name of what verifies it."""
    text: str
    """The instruction as the prompt says it, with its arguments in braces."""
    choices: Mapping[str, Sequence[Json]] = field(default_factory=dict)
    """Values of its arguments, of which each prompt has one."""

    def drawn(self, rng: random.Random) -> tuple[str, dict[str, Json]]:
        arguments = {name: rng.choice(values) for name, values in self.choices.items()}
        return self.text.format(**arguments), arguments


TRAINED_KINDS = (
    Instruction("change_case:english_lowercase", "Write in lower case letters only, as in: we like it."),
    Instruction("change_case:english_capital", "Write in capital letters only, as in: WE LIKE IT."),
    Instruction("punctuation:no_comma", "Do not use any commas."),
    Instruction(
        "length_constraints:number_words", "Use fewer than {num_words} words.",
        {"num_words": (8, 10, 12, 15), "relation": ("less than",)},
    ),
    Instruction(
        "startend:end_checker", "End with the words: {end_phrase}",
        {"end_phrase": ("That is all.", "Thank you.", "What do you think?", "I am sure of it.")},
    ),
    Instruction("startend:quotation", 'Put all of it in double quotation marks, as in: "We like it."'),
    Instruction(
        "detectable_format:number_bullet_lists",
        "Write exactly {num_bullets} bullet points, each on a line that begins with *.",
        {"num_bullets": (2, 3, 4)},
    ),
    Instruction(
        "detectable_content:number_placeholders", "Use a placeholder in square brackets, such as [name].",
        {"num_placeholders": (1,)},
    ),
    Instruction(
        "detectable_format:number_highlighted_sections",
        "Highlight a part with asterisks, as in: *this part*.",
        {"num_highlights": (1,)},
    ),
    Instruction(
        "keywords:existence", 'Use the word "{keywords[0]}" as well.',
        {"keywords": (["old"], ["people"], ["never"], ["green"], ["today"], ["seven"])},
    ),
)  # fmt: skip
NEW_KINDS = (
    Instruction("combination:two_responses", "Write two such sentences, with ****** between them."),
    Instruction(
        "detectable_format:title", "Begin with a title in double angular brackets, as in: <<My title>>."
    ),
    Instruction(
        "detectable_content:postscript", "Then add a line that begins with {postscript_marker}",
        {"postscript_marker": ("P.S.", "P.P.S")},
    ),
    Instruction(
        "length_constraints:number_sentences", "Write at least {num_sentences} sentences.",
        {"num_sentences": (2, 3), "relation": ("at least",)},
    ),
    Instruction(
        "keywords:forbidden_words", 'Do not use the word "{forbidden_words[0]}".',
        {"forbidden_words": (["the"], ["and"], ["is"])},
    ),
    Instruction(
        "change_case:capital_word_frequency", "Write at least {capital_frequency} words in CAPITAL LETTERS.",
        {"capital_frequency": (2, 3), "capital_relation": ("at least",)},
    ),
)  # fmt: skip


def prompts() -> PromptFiles:
    """Return training prompts, held-out ones of other topics, and those of kinds that are not trained on."""
    rng = random.Random(0)
    return {
        "heldout": _rows(HELD_OUT_TOPICS, TRAINED_KINDS, rng),
        "new_kinds": _rows(HELD_OUT_TOPICS, NEW_KINDS, rng),
        "prompts": _rows(TOPICS, TRAINED_KINDS, rng),
    }


def _rows(topics: Sequence[str], kinds: Sequence[Instruction], rng: random.Random) -> list[PromptRow]:
    return [_row(kind, topic, rng) for topic in topics for kind in kinds]


def _row(instruction: Instruction, topic: str, rng: random.Random) -> PromptRow:
    text, arguments = instruction.drawn(rng)
    return {
        "prompt": f'Write a short sentence about {topic}, with the word "{topic}" in it. {text}',
        "metadata": {
            "instruction_id_list": ["keywords:existence", instruction.kind],
            "kwargs": [{"keywords": [topic]}, arguments],
        },
    }
