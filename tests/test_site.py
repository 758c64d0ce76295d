"""The site of the documents: links have their targets, nothing comes from another host, it reads as on a forge."""

import os
import re
import subprocess
import sys
from difflib import unified_diff
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from markdown_it import MarkdownIt

from tests.api.page import conftest as page_conftest

if TYPE_CHECKING:
    import playwright.sync_api as playwright

browser = page_conftest.browser  # a fixture
ENVIRON = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
BLOCKS = {"h1", "h2", "h3", "h4", "li", "tr", "pre", "blockquote"}
VOID = {"br", "hr", "img", "input", "link", "meta"}
NOT_OF_THE_DOCUMENT = {"button", "nav", "script", "style"}


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build a site as `make docs` does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", site]
    return subprocess.run(command, env=ENVIRON, stderr=subprocess.PIPE, text=True, check=False)


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = build(root / "mkdocs.yml", folder)
    assert result.returncode == 0, result.stderr
    return folder


class Outline(HTMLParser):
    """List what a reader sees in an article: the beginnings of blocks, and the characters that are no spaces."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in VOID or (tag != "article" and not self.open):
            return
        self.open.append(tag)
        if self.hidden or tag in NOT_OF_THE_DOCUMENT or ("class", "headerlink") in attributes:
            self.hidden += 1
        elif tag in BLOCKS:
            self.seen.append(f"<{tag}>")

    def handle_endtag(self, tag: str) -> None:
        if self.open and tag not in VOID:
            assert self.open.pop() == tag
            self.hidden = max(self.hidden - 1, 0)

    def handle_data(self, data: str) -> None:
        if self.open and not self.hidden:
            self.seen.extend("".join(data.split()))


def outline(html: str) -> str:
    parser = Outline()
    parser.feed(html)
    return re.sub(r"(?=<\w+>)", "\n", "".join(parser.seen))


def test_every_page_shows_what_a_forge_shows(root: Path, site: Path):
    github = MarkdownIt("commonmark").enable("table")
    for document in root.glob("docs/*.md"):
        expected = outline(f"<article>{github.render(document.read_text())}</article>").splitlines()
        found = outline((site / f"{document.stem}.html").read_text()).splitlines()
        assert len(expected) > 5, document
        assert not list(unified_diff(expected, found, f"{document.name}: forge", "site", n=0))


def test_no_page_loads_anything_from_another_host(site: Path):
    pages = [*site.rglob("*.html")]
    assert len(pages) > 15
    for page in pages:
        loaded = re.findall(r"<(?!a )\w+ [^>]*?(?:src|href|action|data)=[\"']?([^\"' >]+)", page.read_text())
        assert len(loaded) >= 5
        assert [each for each in loaded if re.match(r"(https?:)?//", each)] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text()), sheet


def test_a_link_or_an_anchor_without_a_target_and_a_page_outside_the_navigation_stop_the_build(
    root: Path, tmp_path: Path
):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[1](missing.md) [2](../outside.md) [3](#no-anchor) [4](/absolute.md)")
    (tmp_path / "docs/forgotten.md").write_text("# Not in the navigation")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {root}/mkdocs.yml\nhooks: []\nnav: [index.md]\n")
    result = build(config, tmp_path / "site")
    assert result.returncode == 1
    assert result.stderr.count("WARNING -  ") == 5, result.stderr
    for fault in ("missing.md", "../outside.md", "#no-anchor", "/absolute.md", "forgotten.md"):
        assert result.stderr.count(fault) == 1, result.stderr


def test_the_site_opens_as_files_and_is_searched_without_a_network(site: Path, browser: "playwright.Browser"):
    page = browser.new_page()
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto((site / "index.html").as_uri())
    page.locator("input[name=query]").fill("certificate")
    page.locator(".md-search-result__link", has_text="Certificates").first.click()
    page.wait_for_url(re.compile(r"numbers\.html"))
    page.close()
    assert [url for url in requested if not url.startswith(("file:", "blob:", "data:", "about:"))] == []
