"""Gopher's rules beside their definition."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from data_pipeline.text.cleaning.config import CleaningConfig
from data_pipeline.text.cleaning.gopher import Gopher, GopherConfig
from data_pipeline.text.document import Document, Tally
from data_pipeline.text.step import cleaned as cleaned_by
from tests.support.tables import each

TOKENS = st.lists(st.sampled_from(["a", "bb", "ccc", "dddd"]), min_size=1, max_size=40)
NO_RULES = {
    **{"min_words": 0, "max_words": None, "min_mean_word_length": 0, "max_mean_word_length": None},
    **{"max_symbols_per_word": None, "max_bullet_lines": 1, "max_ellipsis_lines": 1, "min_alphabetic_words": 0},
    **{"min_stop_words": 0, "max_duplicate_lines": 1, "max_duplicate_paragraphs": 1},
    **{"max_duplicate_line_characters": 1, "max_duplicate_paragraph_characters": 1},
    **{"max_top_ngrams": {}, "max_duplicate_ngrams": {}},
}


def broken(text: str, rules: GopherConfig) -> str:
    """The rule that drops the page, or ""."""
    tally = Tally()
    left = cleaned_by(Document(text=text), [Gopher(**dict(rules))], tally)
    assert (left is None) is bool(tally.dropped_documents)
    assert list(tally.dropped_documents.values()) in ([], [1])
    return next(iter(tally.dropped_documents), "").removeprefix("gopher_")


def by(text: str, **rules: object) -> str:
    return broken(text, GopherConfig.model_validate({**NO_RULES, **rules}))


def words(count: int) -> str:
    return " ".join(f"word{number}x" for number in range(count))


def test_the_defaults_are_the_published_thresholds():
    """Rae et al. 2021, appendix A.1.1 and table A1."""
    assert GopherConfig().model_dump() == {
        **{"min_words": 50, "max_words": 100_000, "min_mean_word_length": 3.0, "max_mean_word_length": 10.0},
        **{"max_symbols_per_word": 0.1, "max_bullet_lines": 0.9, "max_ellipsis_lines": 0.3},
        **{"min_alphabetic_words": 0.8, "min_stop_words": 2},
        **{"max_duplicate_lines": 0.30, "max_duplicate_paragraphs": 0.30},
        **{"max_duplicate_line_characters": 0.20, "max_duplicate_paragraph_characters": 0.20},
        "max_top_ngrams": {2: 0.20, 3: 0.18, 4: 0.16},
        "max_duplicate_ngrams": {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10},
    }
    assert CleaningConfig.model_validate({"gopher": True}).gopher == GopherConfig()
    assert CleaningConfig().gopher is None
    assert CleaningConfig.model_validate({"gopher": False}).gopher is None


@each(
    "kept, dropped, rule, setting",
    [
        (words(50), words(49), "too_few_words", {"min_words": 50}),
        (words(60), words(61), "too_many_words", {"max_words": 60}),
        ("abc abc", "abc ab", "short_words", {"min_mean_word_length": 3}),
        ("a" * 10 + " " + "b" * 10, "a" * 10 + " " + "b" * 11, "long_words", {"max_mean_word_length": 10}),
        ("# a b c d e f g h i", "# # a b c d e f g h", "hash_signs", {"max_symbols_per_word": 0.1}),
        ("a... b c d e f g h i j", "a... b… c d e f g h i j", "ellipses", {"max_symbols_per_word": 0.1}),
        ("- a\n" * 9 + "b", "• a\n" * 9 + "\n* b", "bullet_lines", {"max_bullet_lines": 0.9}),
        ("a...\n" * 3 + "b\n" * 7, "a…\n" * 4 + "b\n" * 6, "ellipsis_lines", {"max_ellipsis_lines": 0.3}),
        ("é b c d2 55", "é b c -- 55", "alphabetic_words", {"min_alphabetic_words": 0.8}),
        ("The end OF it", "the end the", "stop_words", {"min_stop_words": 2}),
    ],
)
def test_a_page_is_kept_at_the_threshold_and_dropped_beyond(kept, dropped, rule, setting):
    assert (by(kept, **setting), by(dropped, **setting)) == ("", rule)


def test_repeated_lines_and_paragraphs_count_from_their_second_copy():
    lines = "a\nb\nc\nd\ne\nf\ng\nh\na\nb"  # 2 of 10 lines, 2 of 10 characters
    assert by(lines, max_duplicate_lines=0.2, max_duplicate_line_characters=0.2) == ""
    assert by(lines, max_duplicate_lines=0.19) == "duplicate_lines"
    assert by(lines, max_duplicate_line_characters=0.19) == "duplicate_line_characters"
    paragraphs = "aa\nbb\n\ncc\n \naa\nbb"  # 1 of 3 paragraphs, 5 of 12 characters
    assert by(paragraphs, max_duplicate_paragraphs=0.34, max_duplicate_paragraph_characters=0.42) == ""
    assert by(paragraphs, max_duplicate_paragraphs=0.33) == "duplicate_paragraphs"
    assert by(paragraphs, max_duplicate_paragraph_characters=0.41) == "duplicate_paragraph_characters"


def fraction_of_top(tokens: list[str], n: int) -> float:
    """By definition: occurrences times characters of the most frequent n-gram, 0 if none occurs twice."""
    ngrams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    most = max((ngrams.count(ngram) for ngram in ngrams), default=0)
    if most < 2:
        return 0.0
    return max(most * len("".join(ngram)) for ngram in ngrams if ngrams.count(ngram) == most) / len("".join(tokens))


def fraction_of_repeated(tokens: list[str], n: int) -> float:
    """By definition: characters of the words in any n-gram that occurred before."""
    ngrams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    repeated = {at + step for at, ngram in enumerate(ngrams) if ngram in ngrams[:at] for step in range(n)}
    return len("".join(tokens[place] for place in repeated)) / len("".join(tokens))


@settings(max_examples=150, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 20), min_size=2, max_size=6), st.integers(1, 12))
def test_fractions_of_ngrams_are_those_of_the_definition(tokens, twentieths, first):
    """The rule that drops a page is the first whose fraction is above its limit: shortcuts change nothing."""
    limits = {first + place: twentieth / 20 for place, twentieth in enumerate(twentieths)}
    size = len("".join(tokens))
    top = [n for n, most in limits.items() if fraction_of_top(tokens, n) * size > most * size]
    repeated = [n for n, most in limits.items() if fraction_of_repeated(tokens, n) * size > most * size]
    text = " ".join(tokens)
    for of in (fraction_of_top, fraction_of_repeated):
        assume(all(abs(of(tokens, n) - most) > 1e-9 for n, most in limits.items()))
    assert by(text, max_top_ngrams=limits) == (f"top_{top[0]}_gram" if top else "")
    assert by(text, max_duplicate_ngrams=limits) == (f"duplicate_{repeated[0]}_grams" if repeated else "")
