"""A package offers a kind of tokenizer in two files, by its entry point."""

from data_pipeline.corpus import open_corpus
from tests.conftest import run as run_command
from tests.conftest import write_c4, write_corpus_file
from tests.support.runs import install_page


def test_the_page_on_a_kind_of_tokenizer_works(tmp_path, monkeypatch):
    settings = install_page("reference/own-tokenizers", tmp_path, monkeypatch)
    write_c4(tmp_path / "c4.json.gz", records=40)
    config = write_corpus_file(tmp_path / "corpus.yaml", tokenizer=settings["tokenizer"])
    done = run_command("data-pipeline", "build", config)
    assert done.returncode == 0, done.stderr
    shown = run_command("data-pipeline", "show", tmp_path / "corpus", "-n", "1")
    assert "<extra_id_0>" in shown.stdout
    assert open_corpus(tmp_path / "corpus").manifest.config["packages"] == ["my_package 1.0"]
