"""What MkDocs does besides: pages from the top of the repository, and links out of docs/."""

import os
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
AT_THE_TOP = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
LINK = re.compile(r"\[((?:[^][]|\[[^][]*\])*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in AT_THE_TOP.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links inside the site as MkDocs has them; others to the repository, or nowhere if its URL isn't known."""
    own = {target: source for source, target in AT_THE_TOP.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def linked(found: re.Match[str]) -> str:
        text, path, anchor = found[1], normpath(str(PurePosixPath(own).parent / found[2])), found[3] or ""
        target = AT_THE_TOP.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(target):
            return f"[{text}]({relpath(target, PurePosixPath(page.file.src_uri).parent)}{anchor})"
        if not (ROOT / path).exists():
            return found[0]  # MkDocs reports it
        if not config.repo_url:
            return text
        branch = os.environ.get("READTHEDOCS_GIT_IDENTIFIER", "HEAD")
        return f"[{text}]({config.repo_url.removesuffix('/').removesuffix('.git')}/blob/{branch}/{path})"

    return LINK.sub(linked, markdown)
