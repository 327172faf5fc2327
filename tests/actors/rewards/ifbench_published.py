"""Asks the package `if-verifiable` 0.1.2 which texts follow IFBench's instructions, where it is installed.

NLTK's data of sentences are not there: its tokenizer of words gets the package's own sentences. Those of its
tagger and its stop words lie in the directory that the argument names."""

import json
import sys
from types import ModuleType
from unittest.mock import MagicMock

for name in ("datasets", "langdetect", "immutabledict"):  # for its other half
    sys.modules[name] = MagicMock()
import nltk  # noqa: E402

nltk.data.path = [sys.argv[1]]
nltk.download = lambda *_, **__: True
package = ModuleType("if_verifiable")  # without what it imports
package.__path__ = [f"{path}/if_verifiable" for path in sys.path]
sys.modules["if_verifiable"] = package
from if_verifiable.ifbench import instructions_util  # noqa: E402
from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT  # noqa: E402
from nltk.tokenize.destructive import NLTKWordTokenizer  # noqa: E402


def word_tokenize(text: str) -> list[str]:
    sentences = instructions_util.split_into_sentences(text)
    return [word for sentence in sentences for word in NLTKWordTokenizer().tokenize(sentence)]


nltk.word_tokenize = word_tokenize


def follows(name: str, arguments: dict, text: str) -> bool | str:
    check = INSTRUCTION_DICT[name](name)
    try:
        check.build_description(**arguments)
        return bool(check.check_following(text))
    except (IndexError, ValueError, TypeError) as error:
        return repr(error)


json.dump([follows(*case) for case in json.load(sys.stdin)], sys.stdout)
