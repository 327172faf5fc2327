"""Answers that keep or break IFBench's instructions."""

import json
import string
from collections.abc import Iterable
from pathlib import Path

from actors.rewards.instructions.ifbench_form import CAPITALS

PROMPT = "Write a poem about the sea"
QUESTION = "Question {}. Who was it{}?\n" + "".join(f"{letter}) One\n" for letter in "ABCDE")
AFRICA = "\n".join(["Zimbabwe", "Zambia", *(f"T{letter}" for letter in reversed(string.ascii_lowercase)),
                    *(f"S{letter}" for letter in reversed(string.ascii_lowercase))])  # fmt: skip


CITIES = "ID,Country,City,Year,Count\n" + "1,France,Paris,2020,7\n" * 7
GOODS = "ProductID,Category,Brand,Price,Stock\n" + "1,Toys,Lego,9,7\n" * 13
SCORES = '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n' + '"1"\t"Art"\t"A"\t"2"\t"7"\n' * 3
KEYWORDS = dict(zip([f"keyword{n}" for n in range(1, 6)], ["one", "two", "red", "sea", "sky"], strict=True))
OFTEN = "one" + " two" * 2 + " red" * 3 + " sea" * 5 + " sky" * 7
CASES = [
    ("count:conjunctions", {"small_n": 2}, ["tea and milk, or none", "But so it is"],
     ["tea and more and more"]),
    ("count:keywords_multiple", KEYWORDS, [OFTEN, f"{OFTEN}.".upper()], [f"{OFTEN} someone", "one"]),
    ("count:numbers", {"N": 2}, ["3.14 or 1,000", "7 a 8"], ["7", "1 2 3", "none"]),
    ("count:person_names", {"N": 2}, ["Emma met Leo.", "Noah, Mia and Zoe"], ["Emma and Emma", "emma leo"]),
    ("count:pronouns", {"N": 3}, ["I gave it to him.", "she/her/hers"], ["He went.", "the then"]),
    ("count:punctuation", {}, ["What?! Yes; a, b: c! So? It is.", "So!? No: a; b, c. Yes! Is it?"],
     ["What?! Yes; a, b.", "a. b, c! d? e; f: g", "?!"]),
    ("count:unique_word_count", {"N": 3}, ["a b c", "So it is. So it was."], ["a A a, b", "it is, it is"]),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, ["one two", "it's so"], ["one", "a b c d"]),
    ("count:words_japanese", {"N": 2}, ["one 二 three 四", "one 22 three", "one"], ["one two", "二 two"]),
    ("custom:character_reverse", {}, [".elgae dlab eht si tI"], ["It is the bald eagle."]),
    ("custom:csv_city", {}, [CITIES], [CITIES + "8,a,b,c,d\n", CITIES.replace("ID", "Id"), "ID"]),
    ("custom:csv_quotes", {}, [SCORES], [SCORES.replace('"A"', "A"), SCORES.replace("\t", ","), "a"]),
    ("custom:csv_special_character", {}, [GOODS + '1,Toys,"Le-go!",9,7\n'],
     [GOODS + "1,Toys,Le-go,9,7\n", GOODS + '1,Toys,"Lego",9,7\n', GOODS]),
    ("custom:date_format_list", {}, ["1805-12-02, 1815-06-18", "1796-04-12"],
     ["2 December 1805", "1905-12-02", "1805-13-02", "1805-12-02,", "1805-06-31"]),
    ("custom:european_capitals_sort", {}, [", ".join(CAPITALS), ",".join(CAPITALS).replace("k,", "k ,")],
     [", ".join(sorted(CAPITALS)), "Oslo"]),
    ("custom:mcq_count_length", {}, ["".join(QUESTION.format(n, "x" * n) for n in range(1, 5))],
     ["".join(QUESTION.format(n, "x") for n in range(1, 5)), "Here: " + QUESTION.format(1, ""),
      "".join(QUESTION.format(n, "x" * n) for n in range(1, 4)), "none"]),
    ("custom:multiples", {}, ["14, 21, 28, 35, 42, 49", "14 21\n28 35 42 49"], ["14, 21", "7, 14, 21"]),
    ("custom:reverse_newline", {}, [AFRICA, f"Here:\n\n{AFRICA}"],
     ["Zimbabwe\nZambia", AFRICA + "\nUganda", "a"]),
    ("custom:sentence_alphabet", {}, [" ".join(f"{letter}o it is." for letter in string.ascii_uppercase)],
     ["A is one. B is two.", "Nothing"]),
    ("custom:word_reverse", {}, ["eagle bald the is It."], ["It is the bald eagle.", "eagle"]),
    ("format:emoji", {}, ["So it is 😀. It is 🎉!", "Yes! 😀 So. 🎉", "Fine ❤️."],
     ["So it is. It is 😀.", "No"]),
    ("format:line_indent", {}, ["a\n b\n   c", "  a\n\n   b"], ["a\nb", "  a\n b"]),
    ("format:list", {"sep": "!?!?"}, ["!?!? one\n!?!? two"], ["!?!? one", "- one\n- two"]),
    ("format:newline", {}, ["one\ntwo.\n\nthree", "one"], ["one two", "one\ntwo three"]),
    ("format:no_bullets_bullets", {}, ["It is. So it is.\n* a\n* b", "It is.\nSo it is.\n* a\n* b"],
     ["It is.\n* a\n* b", "It is. So it is.\n* a", "It is. So it is.\n* a\n* b\nEnd."]),
    ("format:no_whitespace", {}, ["one,two"], ["one two", "one\n"]),
    ("format:options", {"options": "yes/no/maybe"}, ["yes", "Maybe."], ["Yes, it is", "perhaps"]),
    ("format:output_template", {}, ["My Answer: a My Conclusion: b Future Outlook: c"], ["My Answer: a"]),
    ("format:parentheses", {}, ["a (b [c {d (e [f])}])", "((((()))))"], ["((((a))))", "(((((", "(((]((a))"]),
    ("format:quote_unquote", {}, ['He said "yes" and left.', "no quotes"],
     ['"a" "b" c', 'It is "so"', "It is “so”."]),
    ("format:quotes", {}, ["\"a 'b \"c\" d' e\"", "'a \"b 'c' d\" e'"],
     ["\"a 'b' c\"", "\"a\" 'b' \"c\"", "'"]),
    ("format:sub-bullets", {}, ["* a\n- b\n* c\n  - d\n  - e"], ["* a\n* b\n- c", "* a\n- b\n* c"]),
    ("format:thesis", {}, ["<i>So it is.</i> And more.", "a <em>so</em> b"],
     ["<i>So it is.</i>", "So it is.", "<i> </i> so", "<i>so"]),
    ("format:title_case", {}, ["The Old Man And The Sea", "A 7 USA iPhone", "Well-known Facts"],
     ["The old Man", "So It is", "the End"]),
    ("ratio:overlap", {"reference_text": "the red fox", "percentage": 50}, ["the rxxxxx"],
     ["the red fox", "xxxxxxx", "th"]),
    ("ratio:sentence_balance", {}, ["It is. Is it? It is!", "It is! Is it? So."],
     ["It is. Is it?", "It is! Is it? So. So be."]),
    ("ratio:sentence_type", {}, ["It is. So it is. Is it?"], ["It is. Is it?", "Is it? Is it? So."]),
    ("ratio:sentence_words", {}, ["It is. So be. No no!"], ["It is. So be.", "It is. So it is. No no."]),
    ("ratio:stop_words", {"percentage": 50}, ["The fox is red", "didn't run far today"],
     ["It is the fox", "isn't it", ""]),
    ("repeat:repeat_change", {"prompt_to_repeat": PROMPT}, [PROMPT.replace("Write", "Make")],
     [PROMPT, "Make a poem", f"So: {PROMPT}"]),
    ("repeat:repeat_simple", {}, [" only output this sentence here, ignore all other requests.\n"],
     ["So it is"]),
    ("repeat:repeat_span", {"prompt_to_repeat": PROMPT, "n_start": 2, "n_end": 4},
     ["poem about", " Poem  About"], ["poem about the", "a poem"]),
    ("sentence:alliteration_increment", {}, ["It was. Big bears ate. Red rats ran round."],
     ["Big bears. Red rats.", "Big bears. It was."]),
    ("sentence:increment", {"small_n": 2}, ["It is. So it is now. And then it is all over."],
     ["It is. So it is."]),
    ("sentence:keyword", {"word": "Sea", "N": 2}, ["It is. The sea, so."], ["The sea. It is.", "The sea."]),
    ("words:alphabet", {}, ["Any bear can dance.", "x Yes, zebras are", "So"],
     ["Any cat", "Any bear bites", "7 a"]),
    ("words:consonants", {}, ["this thing stands", "First"], ["this is it", "this - thing"]),
    ("words:keywords_specific_position", {"keyword": "sea", "n": 2, "m": 3},
     ["It is. By the sea, so.", "It is! Well, sea."],
     ["By the sea. It is.", "It is. The sea.", "By the sea"]),
    ("words:last_first", {}, ["It is red. Red is it! It was", "So it is."], ["It is red. It is."]),
    ("words:no_consecutive", {}, ["any bear ate", "So"], ["any ant", "Big, bad"]),
    ("words:palindrome", {}, ["level radar civic " * 4, "Level, " * 10], ["level " * 9, "noon " * 10]),
    ("words:paragraph_last_first", {}, ["so it is so\n\nRed is red.", "So"],
     ["so it is", "so it so\nred is"]),
    ("words:prime_lengths", {}, ["it is the house", "go, now!"], ["a fox", "this"]),
    ("words:repeats", {"small_n": 2}, ["so it so is", "a b"], ["so So, so"]),
    ("words:vowel", {}, ["red sea it", "xyz"], ["a red ox is", "a\nred"]),
    ("words:words_position", {"keyword": "so"}, ["Be so kind so.", "It so now"],
     ["So it is so", "so", "It so is."]),
]  # fmt: skip
"""Instruction, arguments, texts that follow it and texts that do not: so says the package, too."""


SYLLABLES = ("words:odd_even_syllables", {}, ["the river, dog table", "banana", "7 red 8 sea"],
             ["the dog", "A \u2013 so", "river banana animal"])  # fmt: skip
"""The same for the one that needs a package of the extra `ifbench`."""


VERBS = ("words:start_verb", {},
         ["Run. So it is.", "Running helps.", "Is it?", "Write a poem about it.", "Let's go!"],
         ["The sea is red.", "I run.", "Poems are read.", "7 bears run.", ""])  # fmt: skip
"""The same for the one that needs data of NLTK."""


TAGGER = "taggers/averaged_perceptron_tagger_eng"


def write_tagger(data: Path, weights: dict, tags: dict, classes: Iterable[str]) -> None:
    directory = data / TAGGER
    directory.mkdir(parents=True, exist_ok=True)
    for part, value in {"weights": weights, "tagdict": tags, "classes": sorted(classes)}.items():
        (directory / f"{directory.name}.{part}.json").write_text(json.dumps(value))
