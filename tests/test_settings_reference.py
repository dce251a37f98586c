"""docs/reference/settings.md: generated from the settings, complete, and readable."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    page = PAGE.read_text() + PAGE.with_name("experiments.md").read_text()
    others = {*Path("configs/clusters").iterdir(), *Path("configs/lm_eval").iterdir()}
    files = sorted({*Path("configs").rglob("*.yaml")} - others)
    assert len(files) > 30
    for path in files:
        for key in keys_of(yaml.safe_load(path.read_text())):
            key = re.sub(r"^(rows|data|data\.curriculum\.0|data\.validation\.0)\.objective\.", "objective.", key)
            key = re.sub(r"^objective\.(denoisers\.0\.denoiser|of)\.", "objective.", key)
            assert f"`{key}`" in page or f"`{key}: [" in page, f"{path}: {key}"


def test_every_link_leads_to_a_heading_or_a_file():
    page = PAGE.read_text()
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    assert len(headings) == len(set(headings))
    targets = set(re.findall(r"\]\(([^)]*)\)", page))
    assert {target for target in targets if target.startswith("#")} <= {
        f"#{settings_reference.anchor(one)}" for one in headings
    }
    assert all((PAGE.parent / target).exists() for target in targets if not target.startswith(("#", "http")))
