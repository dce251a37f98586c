"""Bad words in pages of many languages."""

import json
from pathlib import Path

from data_pipeline.stages import report
from data_pipeline.stages.pipeline import build
from tests.support.builds import OFF, plain


def test_bad_words_are_looked_for_in_pages_of_every_tag_and_pages_without_a_list_are_counted_once(tmp_path, capsys):
    """A page of the list's language goes, whichever code its source gives it, and so does one of unknown language.
    The languages of pages that stay have one code each."""
    bad, good = "Nobody says shit here.", "Nobody says much here."
    tags = ["en", "eng", "EN_us", "", "und", "deu", "de", "sw"]
    pages = [{"text": text, "language": tag} for tag in tags for text in (bad, good)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pages))
    settings = {"cleaning": {"profile": "none", "bad_words": ["eng"]}, "dedup": OFF}
    corpus = Path(build(plain(tmp_path, tmp_path / "a.jsonl", "jsonl", **settings), until="documents"))
    found = report.read(corpus)
    assert found.documents == report.DocumentCounts(16, 11, {"bad_words": 5})
    assert found.languages == {"de": 4, "en": 2, "sw": 2, "unknown": 2, "en-us": 1}
    said = [line for line in capsys.readouterr().err.splitlines() if "bad_words" in line]
    shown = "6 (de 4, sw 2); they weren't searched for bad words"
    assert said == [f"documents in languages whose list cleaning.bad_words doesn't name: {shown}"]
