"""What `mkdocs build` does beyond copying pages: the gallery, files from outside docs/, the command line's help."""

import argparse
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import gallery

ROOT = Path(__file__).parents[2]
# Pages that stand at the root of the repository, for people who look there, and are pages here too.
MOVED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# Pages of the repository in whose place the site has another.
REPLACED = {"README.md": "index.md", "examples/gallery/README.md": "gallery/index.md"}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


def place(target: str, source: str) -> str:
    """Where a link of the file `source` (from the root) leads in the site: other pages, or files shown as they are."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return (MOVED | REPLACED).get(path) or f"repository/{path}"


def rewritten(markdown: str, source: str, page: str) -> str:
    """Links out of docs/, and those of pages that came from the root, as they must be in the site."""

    def link(found: re.Match[str]) -> str:
        target = found[2]
        if ":" in target or target.startswith("/"):
            return found[0]
        return found[1] + posixpath.relpath(place(target, source), posixpath.dirname(page) or ".") + found[3]

    return LINK.sub(link, markdown)


def origin(file: File) -> str:
    """Of which file of the repository a page is made."""
    back = {page: source for source, page in MOVED.items()}
    return back.get(file.src_uri, f"docs/{file.src_uri}")


def command_help() -> str:
    """The help of `tangency` and of each of its commands, as argparse prints it."""
    from tangency.cli import _parser

    os.environ["COLUMNS"] = "96"
    parser = _parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    pages = {"tangency": parser} | {f"tangency {name}": p for name, p in commands.choices.items()}
    return "\n".join(f"## {name}\n\n```text\n{p.format_help().rstrip()}\n```\n" for name, p in pages.items())


def on_config(config: MkDocsConfig, **_: Any) -> MkDocsConfig:
    """Make the gallery, and add its pages to the navigation."""
    gallery.build()
    assert config.nav is not None
    for entry in config.nav:
        if "Gallery" in entry:
            entry["Gallery"] += [f"gallery/{example.name}.md" for example in gallery.examples()]
    config.watch.append(str(gallery.EXAMPLES))
    return config


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the gallery, the pages from the root, and whatever file of the repository a page links to."""
    for path in sorted(gallery.MADE.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            uri = f"gallery/{path.relative_to(gallery.MADE).as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    for source, page in MOVED.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for file in [f for f in files if f.is_documentation_page()]:
        for _before, target, _after in LINK.findall(file.content_string):
            path = place(target, origin(file)) if ":" not in target else ""
            linked = ROOT / path.removeprefix("repository/")
            if path.startswith("repository/") and linked.is_file() and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(linked)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links, and the command line's help in its place."""
    if page.file.src_uri == "reference/command_line.md":
        markdown = markdown.replace("<!-- help -->", command_help())
    return rewritten(markdown, origin(page.file), page.file.src_uri)
