"""What MkDocs does besides: pages from the top of the repository, notebooks, and links out of docs/."""

import json
import os
import re
from base64 import b64decode
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
AT_THE_TOP = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
LINK = re.compile(r"\[((?:[^][]|\[[^][]*\])*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
NOTEBOOK = ".ipynb"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in AT_THE_TOP.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for file in [file for file in files if file.src_uri.endswith(NOTEBOOK)]:
        page, pictures = _notebook(json.loads(file.content_string), file.name)
        files.append(File.generated(config, file.src_uri.replace(NOTEBOOK, ".md"), content=page))
        for name, content in pictures.items():
            files.append(File.generated(config, str(PurePosixPath(file.src_uri).with_name(name)), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links inside the site as MkDocs has them; others to the repository, or nowhere if its URL isn't known."""
    own = {target: source for source, target in AT_THE_TOP.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def linked(found: re.Match[str]) -> str:
        text, path, anchor = found[1], normpath(str(PurePosixPath(own).parent / found[2])), found[3] or ""
        target = AT_THE_TOP.get(path, path.removeprefix("docs/"))
        if page.file.src_uri != target.replace(NOTEBOOK, ".md"):  # a notebook's page links to its file
            target = target.replace(NOTEBOOK, ".md")
        if files.get_file_from_path(target):
            return f"[{text}]({relpath(target, PurePosixPath(page.file.src_uri).parent)}{anchor})"
        if not (ROOT / path).exists():
            return found[0]  # MkDocs reports it
        if not config.repo_url:
            return text
        branch = os.environ.get("READTHEDOCS_GIT_IDENTIFIER", "HEAD")
        return f"[{text}]({config.repo_url.removesuffix('/').removesuffix('.git')}/blob/{branch}/{path})"

    return LINK.sub(linked, markdown)


def _notebook(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """The page of a notebook with its outputs, and its pictures by file name."""
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                picture = f"{name}-{len(pictures) + 1}.png"
                pictures[picture] = b64decode("".join(data["image/png"]))
                parts.append(f"![The picture that this cell draws]({picture})")
            elif "text/html" in data:
                parts.append(re.sub(r'(?s)<style.*?</style>|\n\s*| class="dataframe"', "", "".join(data["text/html"])))
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    parts.insert(1, f"[Download this notebook]({name}{NOTEBOOK}).")
    return "\n\n".join(parts) + "\n", pictures
