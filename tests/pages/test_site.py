"""The site of the pages, without its generator: each page has one place in the navigation, and links lead somewhere."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import disco_accel
from disco_accel import errors
from disco_accel.config.settings import SECTION
from tests.pages.links import anchors_of, dead_link, links_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = DOCS / "site" / "mkdocs.yml"
PAGES = sorted(path for top in (DOCS, ROOT / "disco_accel", ROOT / "tests") for path in top.rglob("*.md"))
PAGES += sorted(ROOT.glob("*.md"))


def entries(nav: Any) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav if isinstance(nav, list) else nav.values()
    return [page for part in parts for page in entries(part)]


def faults_of_nav(listed: list[str], there: list[str]) -> list[str]:
    """Each with its remedy."""
    place = SITE.relative_to(ROOT).as_posix()
    return [
        *(f"docs/{page} has no place in {place}: add it to nav" for page in there if page not in listed),
        *(f"{place} names {page}, which is not in docs/" for page in listed if page not in there),
        *(f"{place} names {page} {count} times" for page, count in Counter(listed).items() if count > 1),
    ]


def test_each_page_has_one_place_in_the_navigation() -> None:
    there = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    listed = entries(yaml.safe_load(SITE.read_text())["nav"])
    assert not (found := faults_of_nav(listed, there)), "\n".join(found)


def test_a_page_without_a_place_and_a_place_without_a_page_are_named() -> None:
    nav = [{"First": ["a.md", {"Second": "b.md"}]}, "a.md", "gone.md"]
    assert entries(nav) == ["a.md", "b.md", "a.md", "gone.md"]
    assert [fault.split(":")[0] for fault in faults_of_nav(entries(nav), ["a.md", "b.md", "new.md"])] == [
        "docs/new.md has no place in docs/site/mkdocs.yml",
        "docs/site/mkdocs.yml names gone.md, which is not in docs/",
        "docs/site/mkdocs.yml names a.md 2 times",
    ]


def test_pages_of_the_site_load_nothing_from_a_network() -> None:
    """A theme of the generator's own, without the highlighting that both bring from a network, and files from here."""
    site = yaml.safe_load(SITE.read_text())
    assert site["theme"]["name"] in ("mkdocs", "readthedocs") and site["theme"]["highlightjs"] is False
    assert site["extra_css"] and all((DOCS / file).is_file() for file in site["extra_css"])
    assert not {"extra_javascript", "google_analytics"} & site.keys()


def test_links_between_pages_lead_somewhere() -> None:
    """Files, and anchors that are the same on a forge and on the site."""
    found = [fault for page in PAGES for link in links_of(page) if (fault := dead_link(page, link, ROOT))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("gone.md", "no such file"),
        ("../outside.md", "no such file"),
        ("folder", "a folder"),
        ("#gone", "no heading has this anchor; there are a-head, a-head-of-code"),
        ("page.md#a--dash", "no heading"),
    ],
)
def test_a_dead_link_is_named(tmp_path: Path, link: str, words: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A head\n\n## A head: of `code`\n\n## A - dash\n\n[a]({link}) `[b](code.md)`\n")
    (tmp_path / "folder").mkdir()
    assert anchors_of(page) == {"a-head", "a-head-of-code"}
    assert links_of(page) == [link]
    assert words in str(dead_link(page, link, tmp_path))


def test_links_that_lead_somewhere_are_no_faults(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A head\n")
    good = ("page.md", "#a-head", "page.md#a-head", "https://example.org/x")
    assert [dead_link(page, link, tmp_path) for link in good] == [None] * len(good)


def test_every_typed_error_is_on_the_page_of_errors() -> None:
    """As the heading that a reader looks for."""
    classes = [
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    ]
    headings = re.findall(r"^#{2,3} `(\w+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(classes)


def test_every_public_name_is_on_the_page_of_names() -> None:
    """Signatures and docstrings are put in by the generator."""
    marked = re.findall(r"^<!-- api: disco_accel\.(\w+) -->$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(marked) == sorted([*(name for name in disco_accel.__all__ if name[0] != "_"), "errors"])


def test_the_generator_is_pinned_and_no_part_of_the_setup() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    names = [requirement.split("[")[0] for requirement in extras["docs"]]
    assert names and not [name for name in names if name not in pinned]
    assert (
        not [name for name in names if any(name in line for line in extras["dev"])] and "docs" not in extras["dev"][0]
    )


@functools.cache
def texts_of_the_package() -> str:
    """All texts in its code, one a line, with ``…`` where a value is put in, and in the place of line ends."""
    paths = [path for path in (ROOT / "disco_accel").rglob("*.py")]
    found = (text for path in paths for node in ast.walk(ast.parse(path.read_text())) if (text := _text(node)))
    return "\n".join(text.replace("\n", "…").replace("%s", "…").replace("%d", "…") for text in found)


def _text(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) or "…" for part in parts)
        case ast.FormattedValue(value=ast.Name(id="SECTION")):
            return SECTION
    return ""


def parts_of(message: str) -> list[str]:
    """The words of a message between values, without the shortest, which stand in many."""
    return [part for part in (p.strip(" ,;:()'") for p in message.split("…")) if len(part) > 6]


def test_messages_are_those_of_the_code() -> None:
    """Word by word between values: of the first columns, and of messages in running text."""
    page = (DOCS / "troubleshooting.md").read_text().split("## Settings and files")[1]
    cells = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    running = [" ".join(text.split()) for text in re.findall(r"`([^`]*…[^`]*)`", page)]
    assert len(cells) > 60
    wanted = {part for message in (*cells, *running) for part in parts_of(message)}
    missing = [part for part in sorted(wanted) if part not in texts_of_the_package()]
    assert not missing, "\n".join(missing)
