"""docs/reference/settings.md and the pages of packages in `examples`: generated from the settings, and complete."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_pipeline.base.config_file import Section, in_brief, meaning, sections_in
from data_pipeline.config import CorpusConfig
from data_pipeline.sources.formats import FORMATS
from docs.site import settings_reference
from pretrain.config import RunConfig

PAGE = Path("docs/reference/settings.md")


def settings_in(schema: type[Section]) -> Iterator[type[Section]]:
    """A class of settings, and those that its fields hold."""
    yield schema
    for field in schema.model_fields.values():
        for below in sections_in(field):
            yield from settings_in(below)


def keys_of(value: Any, path: str = "") -> Iterator[str]:
    """The keys of a YAML file as the reference writes them: `sources.0.path`."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield f"{path}{key}"
            yield from keys_of(below, f"{path}{key}.")
    elif isinstance(value, list):
        for below in value:
            yield from keys_of(below, f"{path}0.")


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text() == settings_reference.page(), (
        "out of date: python -m docs.site.settings_reference > docs/reference/settings.md"
    )


@pytest.mark.parametrize("package", settings_reference.PACKAGES)
def test_the_page_of_a_package_is_what_its_code_says(package):
    page = Path(f"examples/{package}/settings.md")
    assert page.read_text() == settings_reference.package_page(package), (
        f"out of date: python -m docs.site.settings_reference {package} > {page}"
    )
    assert "(settings.md)" in page.with_name("README.md").read_text()


def test_each_package_that_adds_keys_has_a_page():
    adding = {
        path.parent.name
        for path in Path("examples").glob("*/pyproject.toml")
        if tomllib.loads(path.read_text())["project"].get("entry-points")
    }
    assert adding == set(settings_reference.PACKAGES)


def test_a_key_with_the_same_meaning_is_said_once():
    """Also where a section of the corpus file and a step have the key, or several model families."""
    page = PAGE.read_text()
    for keys, sentence in (
        (["cleaning.gopher.min_words", "steps.0.min_words"], "Minimum number of words of a page. 0: off."),
        (["model.d_model", "model.encoder.d_model"], "Width of the embeddings and of the output of every sublayer."),
    ):
        (row,) = [line for line in page.splitlines() if line.endswith(f"| {sentence} |")]
        assert all(f"`{key}`" in row for key in keys)
    (row,) = re.findall(r"^\| `model.label_smoothing` .*$", page, re.MULTILINE)
    assert re.search(r"\| `0.0` \(t5, .*\), `0.1` \(vanilla\) +\| all ", row), row


def test_every_setting_has_a_meaning_whose_beginning_fits_into_a_message():
    classes = {
        found
        for schema in (CorpusConfig, RunConfig, *(known.options for known in FORMATS.values()))
        for found in settings_in(schema)
    }
    assert len(classes) > 50
    for section in classes:
        assert section is Section or section.__doc__ != Section.__doc__, section
        for key in section.model_fields:
            said = meaning(section, key)
            assert said.endswith("."), f"{section.__name__}.{key} needs a docstring below it: {said!r}"
            assert len(in_brief(said)) <= 140, f"{section.__name__}.{key}"


def test_every_key_of_a_shipped_file_stands_in_the_reference():
    pages = [
        PAGE,
        PAGE.with_name("experiments.md"),
        *(Path(f"examples/{name}/settings.md") for name in settings_reference.PACKAGES),
    ]
    page = "".join(path.read_text() for path in pages)
    others = {*Path("configs/clusters").iterdir(), *Path("configs/lm_eval").iterdir()}
    files = sorted({*Path("configs").rglob("*.yaml")} - others)
    assert len(files) > 30
    for path in files:
        for key in keys_of(yaml.safe_load(path.read_text())):
            key = re.sub(r"^(rows|data|data\.curriculum\.0|data\.validation\.0)\.objective\.", "objective.", key)
            key = re.sub(r"^objective\.(denoisers\.0\.denoiser|of)\.", "objective.", key)
            assert f"`{key}`" in page or f"`{key}: [" in page, f"{path}: {key}"


@pytest.mark.parametrize(
    "path", [PAGE, *(Path(f"examples/{name}/settings.md") for name in settings_reference.PACKAGES)]
)
def test_every_link_leads_to_a_heading_or_a_file(path):
    headings = headings_of(path)
    assert len(headings) == len(set(headings))
    for link in set(re.findall(r"\]\(([^)]*)\)", path.read_text())):
        target, _, heading = link.partition("#")
        if not target.startswith("http"):
            found = path.parent / target if target else path
            assert found.exists(), link
            assert not heading or heading in map(settings_reference.anchor, headings_of(found)), link


def headings_of(path: Path) -> list[str]:
    return re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
