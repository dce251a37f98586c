"""The Python reference is what the code says, and the pages make a site."""

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import nbformat
import pytest
import yaml
from markdown_it import MarkdownIt
from nbclient import NotebookClient
from packaging.requirements import Requirement

import data_pipeline
import launch
import pretrain
from docs.site import python_reference
from tests.conftest import TOP
from tests.support.tables import each

REFERENCE = (TOP / "docs/reference/python.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return re.search(rf"(?ms)^#+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", REFERENCE)[1]


def test_the_python_reference_is_what_the_code_says():
    assert python_reference.page() == REFERENCE, "python -m docs.site.python_reference > docs/reference/python.md"


@each("package", [data_pipeline, pretrain, launch])
def test_the_reference_describes_every_parameter_of_every_public_name(package):
    """Beside Python's own reading of the objects."""
    for name in package.__all__:
        public = getattr(package, name)
        own = vars(public).items() if inspect.isclass(public) else ()
        functions = {f"{name}.{key}": one for key, one in own if inspect.isfunction(one) and key[0] != "_"}
        for heading, function in functions.items() or [(f"{package.__name__}.{name}", public)]:
            found = section(heading)
            code, words = re.search(r"(?s)```python\n(.*?)```(.*)", found).groups()
            if inspect.isclass(function):
                assert code.startswith(f"class {name}")
                continue
            parameters = inspect.signature(function).parameters.keys() - {"self"}
            assert set(re.findall(r"(\w+): ", code)) == parameters, heading
            assert [one for one in parameters if f"`{one}`" not in words] == [], heading


def test_read_the_docs_installs_what_the_extra_declares():
    config = yaml.safe_load((TOP / ".readthedocs.yaml").read_text())
    (install,) = config["build"]["jobs"]["install"]
    extra = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    packages = install.removeprefix("pip install --constraint constraints.txt ").split()
    assert set(packages) == {Requirement(one).name for one in extra} - {"griffelib"}  # its page is committed
    assert (TOP / config["mkdocs"]["configuration"]).is_file()


def shape(html: str) -> Counter[str]:
    """The lists, tables, blocks of code, headings and pictures in some HTML."""
    return Counter(re.findall(r"<(li|ul|ol|table|tr|pre|h[2-6]|img|em|strong)\b", html))


@pytest.mark.slow
def test_the_site_is_built_without_a_broken_link_and_looks_as_on_github(tmp_path):
    """CommonMark's reference in Python, markdown-it, renders the pages as GitHub does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    repository = {"REPOSITORY_URL": "https://example.org/owner/name.git"}
    done = subprocess.run(command, cwd=TOP, env={**os.environ, **repository}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    markdown = MarkdownIt("commonmark").enable("table")
    for page in (*(TOP / "docs").rglob("*.md"), *TOP.glob("*.md")):
        name = page.relative_to(TOP / "docs" if "docs" in page.parts[len(TOP.parts) :] else TOP).with_suffix("")
        html = (tmp_path / ("" if page == TOP / "README.md" else name) / "index.html").read_text(encoding="utf-8")
        article = re.search(r"(?s)<article class=\"md-content__inner.*?</article>", html)[0]
        assert shape(article) == shape(markdown.render(page.read_text(encoding="utf-8"))), page
        assert re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//", html) == [], page
    reference = (tmp_path / "reference/python/index.html").read_text(encoding="utf-8")
    assert 'href="https://example.org/owner/name/blob/HEAD/data_pipeline/from_python.py"' in reference
    found = json.loads((tmp_path / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    assert {"reference/python/#corpusloader", "reference/settings/#optimizer"} <= {one["location"] for one in found}


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    """In a kernel of its own, with few steps. What the committed cells show is of the same kind."""
    path = TOP / "docs/tutorials/in-a-notebook.ipynb"
    committed, notebook = (nbformat.read(path, 4) for _ in range(2))
    cells, run = ([cell for cell in one.cells if cell.cell_type == "code"] for one in (committed, notebook))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    text = path.read_text(encoding="utf-8")
    assert [place for place in (f"{Path.home()}/", str(TOP), "/tmp") if place in text] == []
    assert cells[0].source.startswith("STEPS = ")
    run[0].source = re.sub(r"STEPS = \d+", "STEPS = 12", cells[0].source)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    kinds = [[sorted(output.get("data", ())) for cell in one for output in cell.outputs] for one in (cells, run)]
    assert [one for one in kinds[0] if one] == [one for one in kinds[1] if one]
    assert sum("image/png" in one for one in kinds[1]) == 1
    assert [one.name for one in pretrain.Run(tmp_path / "run").checkpoints] == ["step-00000012"]
