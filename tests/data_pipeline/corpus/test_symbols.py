"""Each match of a pattern is a token; text that no match covers is refused with its place."""

import json
import re
import unicodedata
from collections import Counter

import pytest
from tokenizers import Regex, pre_tokenizers

from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer import Tokenizer, load, save
from data_pipeline.corpus.tokenizer.symbols import Symbols, SymbolsConfig, in_oniguruma
from data_pipeline.stages.report import visible
from tests.support.in_process import done_here, run_here
from tests.support.reading import c4_pages
from tests.support.tables import each

# Molecular Transformer's pattern of atoms and bonds (Schwaller et al. 2019).
SMILES = r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>|\*|\$|\%[0-9]{2}|[0-9])"
MOLECULES = ["CCO", "c1ccc(Br)cc1", "C[nH]1cccc1Cl", "CC(=O)N%10CC%10"]
PROTEINS = ["MKTAYIAKQR", "GLSDGEWQLV"]
CODE = "def f(x):\n\treturn x  # two spaces\n"


def trained(texts, **settings):
    return SymbolsConfig(**settings).train([text.encode() for text in texts])


def test_characters_by_hand():
    """b occurs three times, a and a line break twice: by count, and then by their code points."""
    tokenizer = Tokenizer(trained(["ab\nb", "ba\n"]), sentinels=2)
    assert tokenizer.model.symbols == ["b", "\n", "a"]
    assert tokenizer.encode(["ab\n", "x", ""]) == [[5, 3, 4], [2], []]
    assert tokenizer.decode([5, 3, 4, 7, 5]) == "ab\n<extra_id_0>a"
    vocabulary = tokenizer.vocabulary
    assert (vocabulary.pad, vocabulary.eos, vocabulary.unk, vocabulary.text) == (0, 1, 2, (3, 6))
    assert (vocabulary.size, vocabulary.sentinel(0), vocabulary.sentinel(1)) == (8, 7, 6)
    assert tokenizer.encode_with_sentinels("a<extra_id_0>b") == [5, 7, 3, 1]


@each(
    "pattern, texts",
    [(".", [*PROTEINS, CODE, *c4_pages()[:50]]), (SMILES, MOLECULES), (r"\s|\w+|[^\w\s]", [CODE, *c4_pages()[:50]])],
)
def test_every_text_comes_back_as_it_was(pattern, texts):
    tokenizer = Tokenizer(trained(texts, pattern=pattern))
    ids = tokenizer.encode(texts)
    assert [tokenizer.decode(one) for one in ids] == texts
    counts = Counter(match[0] for text in texts for match in re.finditer(pattern, text, re.DOTALL))
    assert tokenizer.model.symbols == sorted(counts, key=lambda symbol: (-counts[symbol], symbol))
    assert [len(one) for one in ids] == [len(re.findall(f"(?:{pattern})", text, re.DOTALL)) for text in texts]
    for array, one in zip(tokenizer.model.encode_to_arrays(texts), ids, strict=True):
        assert array.tolist() == one


def test_words_are_joined_by_spaces_and_atoms_are_not():
    words, atoms = trained(["to be or  not\nto be"], pattern=r"\S+"), trained(MOLECULES, pattern=SMILES)
    assert words.decode(words.encode(["be  not\nto"])[0]) == "be not to"
    assert words.vocabulary.word_starts[3:].all()
    assert (words.gap, atoms.gap) == (" ", "")
    tokenizer = Tokenizer(words, sentinels=1)
    assert tokenizer.decode(tokenizer.encode_with_sentinels("to <extra_id_0> not")) == "to <extra_id_0> not"
    assert set(atoms.symbols) >= {"Br", "Cl", "[nH]", "%10"}


def test_the_most_frequent_symbols_stay_and_others_are_unknown():
    model = trained(["aaabbc"], vocab_size=5)
    assert model.symbols == ["a", "b"]
    assert model.encode(["abcab"]) == [[3, 4, 2, 3, 4]]
    assert model.without_token(["abcc"]) == {"c": 2}


def test_the_last_symbol_of_a_sample_that_may_be_cut_is_not_counted():
    assert trained(["one two thr"], pattern=r"\S+", sample_bytes=11).symbols == ["one", "two"]
    assert trained(["one two thr"], pattern=r"\S+", sample_bytes=12).symbols == ["one", "thr", "two"]


@each(
    "pattern, text, place",
    [
        (SMILES, "CCO CC Zn", "'Z' at character 7 isn't in a match of tokenizer.pattern: 'CCO CC Zn'"),
        (SMILES, "C" * 100 + "!" + "O" * 100, f"'!' at character 100 .*: '{'C' * 20}!{'O' * 19}'"),
        ("[A-Z]", "MKx", "'x' at character 2 isn't"),
    ],
)
def test_text_between_matches_is_refused_with_its_first_place(pattern, text, place):
    model = Symbols(pattern, ["C", "O"])
    with pytest.raises(UserError, match=place):
        model.encode([text])
    assert model.encode(["C \n\tO "]) == [[3, 4]]  # white space may stand there


def test_names_of_special_tokens_are_no_symbols():
    model = trained(["</s> a [R] <extra_id_0> <pad>"], pattern=r"\S+", special_tokens=["[R]"])
    assert model.symbols == ["a"]
    assert Tokenizer(model, ["[R]"], 1).encode(["</s> [R] a"]) == [[2, 2, 3]]


def test_the_lines_of_a_file_are_the_symbols_in_their_order(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("C\nO\r\nBr\n")
    model = SymbolsConfig(path=str(path), pattern=SMILES).existing()
    assert model.symbols == ["C", "O", "Br"]
    assert model.encode(["BrCO", "N"]) == [[5, 3, 4], [2]]


@each(
    "content, problem",
    [
        ("C\n\nO\n", "line 2 is empty"),
        ("C\nO\nC\n", "line 3: 'C' is on line 1, too"),
        ("C\n<pad>\n", "line 2: '<pad>' is a special token's name"),
        ("C\nCO\n", "line 2: 'CO' is no match of tokenizer.pattern"),
        ("", "lists no symbols"),
    ],
)
def test_a_list_that_is_no_list_of_symbols_is_refused(tmp_path, content, problem):
    path = tmp_path / "vocab.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=problem):
        SymbolsConfig(path=str(path), pattern=SMILES).existing()
    with pytest.raises(UserError, match="no such file"):
        SymbolsConfig(path=str(tmp_path / "nowhere.txt")).existing()


@each("pattern, problem", [("(", "no regular expression"), ("a*", "matches the empty text")])
def test_patterns_that_cannot_be_are_refused(pattern, problem):
    with pytest.raises(ValueError, match=problem):
        SymbolsConfig(pattern=pattern)


def test_a_saved_tokenizer_is_loaded_as_it_was(tmp_path):
    model = trained(MOLECULES, pattern=SMILES)
    tokenizer = Tokenizer(model, ["[R]"], 10)
    save(tokenizer, tmp_path)
    assert load(tmp_path).describe() == tokenizer.describe()
    for path in (tmp_path, tmp_path / "tokenizer"):
        assert SymbolsConfig(path=str(path)).existing().sha256 == model.sha256
    with pytest.raises(UserError, match=r"tokenizer\.pattern: .* has .*; leave pattern out"):
        SymbolsConfig(path=str(tmp_path), pattern=".").existing()


@each("pattern, texts", [(".", [CODE, *PROTEINS]), (SMILES, MOLECULES), (r"\S+", [CODE]), (r"\w+|[^\w\s]", [CODE])])
def test_the_librarys_tokenizer_gives_the_same_ids(pattern, texts):
    model = trained(texts, pattern=pattern)
    backend = model.backend()
    ids = model.encode(texts)
    assert [one.ids for one in backend.encode_batch(texts)] == ids
    assert [backend.decode(one) for one in ids] == [model.decode(one) for one in ids]


@each(
    "pattern",
    [".", r"\s", r"\S+", r"\w+", r"\W", r"\d", r"[^\W\d]+|.", r"[^\S\n]+|\w", "[]a[&&b-d]+", r"[\]x^]", "[^[]"],
)
def test_patterns_in_oniguruma_match_what_they_match_in_python(pattern):
    """Beside every character up to U+FFFF and some above, each behind an a and before a b."""
    codes = [*range(0xD800), *range(0xE000, 0x10000), *range(0x1F600, 0x1F650), *range(0x1D7CE, 0x1D7FF)]
    text = "".join(f"a{chr(code)}b" for code in codes if unicodedata.category(chr(code)) != "Cn")
    split = pre_tokenizers.Split(Regex(in_oniguruma(pattern)), behavior="removed", invert=True)
    assert [part for part, _ in split.pre_tokenize_str(text)] == re.findall(pattern, text, re.DOTALL)


def test_a_pattern_that_the_library_reads_otherwise_has_no_export():
    """Names of groups are Python's own."""
    with pytest.raises(UserError, match=r"tokenizer\.pattern: .* (means something else|has no form)"):
        trained(["ab"], pattern=r"(?P<one>a)(?<!x)|b(?P=one)?").backend()


def test_a_build_names_the_document_that_the_pattern_does_not_cover(tmp_path):
    (tmp_path / "smiles.txt").write_text("CCO\n\nCCZn\n")
    corpus = {
        "name": "x",
        "output": str(tmp_path / "corpus"),
        "sources": [{"format": "text", "path": str(tmp_path / "smiles.txt"), "options": {"sample_by": "line"}}],
        "cleaning": {"profile": "none"},
        "tokenizer": {"kind": "symbols", "pattern": SMILES},
    }
    (tmp_path / "corpus.yaml").write_text(json.dumps(corpus))
    done = run_here("data-pipeline", "build", tmp_path / "corpus.yaml")
    place = "text/smiles.txt/000000001: text: 'Z' at character 2 isn't in a match of tokenizer.pattern: 'CCZn'"
    assert (done.returncode, place in done.stderr) == (2, True)


def test_symbols_are_shown():
    assert [visible(symbol) for symbol in ("Cl", "\n", "a b", "\u0301")] == ["Cl", "U+000A", "a b", "U+0301"]


@each("path", [None, "vocab.txt"])
def test_long_lower_case_and_ambiguous_sequences_stay_whole_and_what_is_unknown_is_counted(path, tmp_path):
    """A million residues, lower-case ones, and letters for several amino acids: without a list, each is a symbol."""
    sequences = ["MKTAYIAKQR" * 100_000, "mkTAy", "MKTBXZ*-AY", "TAY"]
    (tmp_path / "a.fa").write_text("".join(f">{number}\n{one}\n" for number, one in enumerate(sequences)))
    (tmp_path / "vocab.txt").write_text("\n".join("MKTAYIQR"))
    corpus = {
        "name": "x",
        "output": str(tmp_path / "corpus"),
        "sources": [{"format": "fasta", "path": str(tmp_path / "a.fa")}],
        "cleaning": {"profile": "none"},
        "split": {"validation_fraction": 0.0},
        "tokenizer": {"kind": "symbols", **({"path": str(tmp_path / path)} if path else {})},
        "rows": {"packing": "complete_documents", "objective": {"name": "prefix_lm", "length": 1000}},
    }
    (tmp_path / "corpus.yaml").write_text(json.dumps(corpus))
    said = done_here("data-pipeline", "build", tmp_path / "corpus.yaml")
    found = open_corpus(tmp_path / "corpus")
    assert found.manifest.splits["train"].tokens == sum(map(len, sequences))
    report = json.loads((tmp_path / "corpus/report.json").read_text())["coverage"]
    if path is None:
        assert set("mkyBXZ*-") < set(found.tokenizer.model.symbols)
        assert report["unknown"] == 0
    else:
        assert report["unknown"] == len("mky") + len("BXZ*-")
        assert report["characters"] == dict.fromkeys(sorted("mkyBXZ*-"), 1)
        assert "unknown" in said
