"""What the pages point to exists: links, their anchors, and the files that they name in code font."""

import re
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

from tests.support.tables import each

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(path for top in ("docs", "examples") for path in (ROOT / top).rglob("*.md")),
]
CODE = re.compile(r"(?ms)^```.*?^```|^(?: {4}|\t)[^\n]*|`[^`\n]+`")
# a file of the repository by its path, or a Python file by its name alone
TOPS = "configs|examples|experiments|data_pipeline|pretrain|launch|tests|checks|benchmarks|docs|docker|deploy"
PATH = re.compile(rf"(?<![\w./~:-])(?:{TOPS})/[\w./*-]+")
PYTHON_FILE = re.compile(r"(?<![\w./-])\w+\.py\b")
SHIPPED = re.compile(r"configs:([\w./-]+)")
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b")  # FAMILY.py, configs:NAME
LISTED = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
PYTHON_FILES = {Path(path).name for path in LISTED.split()}
COMMAND = re.compile(r"(?:python -m|pretrain|data-pipeline|launch|make|pip|git) [\w.-]+ ?[\w./-]*(?: --|\n|$)")
MODULE = re.compile(r"python -m ((?:tests|checks|examples|experiments)[\w.]+)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def anchors(page: Path) -> set[str]:
    """GitHub's: of each heading outside code, and of repeated ones with a number."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"(?m)^#{1,6} +(.+?) *$", re.sub(r"(?ms)^```.*?^```", "", text_of(page))):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return names


@each("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(page):
    prose = CODE.sub("", text_of(page)) if "reference" not in page.parts else text_of(page)
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


@each("page", PAGES)
def test_no_command_is_prose(page):
    """As one that is indented by four below a list is, since it belongs to the list's last item."""
    tokens = MarkdownIt().parse(text_of(page))
    paragraphs = [after.content for before, after in pairwise(tokens) if before.type == "paragraph_open"]
    assert [text for text in paragraphs if COMMAND.match(text)] == []


@each("page", PAGES)
def test_every_file_in_code_font_exists(page):
    lost = []
    for code in CODE.findall(text_of(page)):
        lost += [path for path in PATH.findall(code) if not list(ROOT.glob(path.rstrip("./")))]
        lost += [f"configs:{path}" for path in SHIPPED.findall(code) if not (ROOT / "configs" / path).exists()]
        lost += [name for name in PYTHON_FILE.findall(code) if name not in PYTHON_FILES]
        modules = [ROOT / name.replace(".", "/") for name in MODULE.findall(code)]
        lost += [str(path) for path in modules if not path.is_dir() and not path.with_suffix(".py").exists()]
    assert [path for path in lost if not PLACEHOLDER.search(path)] == []


def test_every_page_that_code_and_configs_name_exists():
    listed = subprocess.run(["git", "grep", "-ohE", r"docs/[a-z0-9/-]+\.(md|svg|png)", "--", ".", ":!*.md"],
                            cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()  # fmt: skip
    assert listed
    assert [name for name in set(listed) if not (ROOT / name).exists()] == []


def test_pages_outside_reference_and_results_are_short():
    """A page is read at one sitting; what is looked up or was measured has folders of its own."""
    prose = {
        page: len(text_of(page).split())
        for folder in ("tutorials", "how-to", "explanation")
        for page in (ROOT / "docs" / folder).glob("*.md")
    }
    assert {page: count for page, count in prose.items() if count > 2_500} == {}
    assert sum(prose.values()) <= 25_000
