"""The site, built strictly: nothing is missing, nothing leads nowhere, nothing comes from elsewhere."""

import logging
import re
import runpy
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from mkdocs.config import load_config
from mkdocs.structure.files import File, get_files
from mkdocs.structure.nav import get_navigation

import codistill
from codistill.transfer import methods
from codistill.transfer.graph import Outline
from support.markup import Markup
from support.site import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Markup]:
    """By their address within the site, as in ``methods/index.html``."""
    return {str(file.relative_to(site)): Markup.read(file) for file in sorted(site.rglob("*.html"))}


def test_every_document_is_a_page(pages: dict[str, Markup]) -> None:
    documents = [file.relative_to(DOCS).with_suffix("") for file in DOCS.rglob("*.md")]
    assert len(documents) >= 20
    expected = {str(name.parent if name.name == "index" else name).removeprefix(".") for name in documents}
    assert {f"{name}/index.html".removeprefix("/") for name in expected} <= set(pages)


def test_pages_are_made_of_files_outside_docs(pages: dict[str, Markup]) -> None:
    for page, words in {
        "results": "Published results",
        "contributing": "Contributing",
        "changelog": "Changelog",
        "notebook": "Networks that teach each other",
        "examples/by_hand": "DCM for two small networks",
    }.items():
        assert words in "".join(pages[f"{page}/index.html"].texts)


def test_nothing_is_loaded_from_elsewhere(pages: dict[str, Markup], site: Path) -> None:
    loaded = [(page, address) for page, markup in pages.items() for address in markup.loaded]
    assert len(loaded) > 200
    assert [pair for pair in loaded if urlsplit(pair[1]).netloc] == []
    sheets = list(site.rglob("*.css"))
    assert len(sheets) >= 3
    assert [sheet for sheet in sheets if re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text())] == []


def test_links_lead_to_pages_and_to_places_in_them(pages: dict[str, Markup], site: Path) -> None:
    checked = 0
    for page, markup in pages.items():
        if page == "404.html":  # it may be shown anywhere, so its links begin at the root
            continue
        for link in markup.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (site / page).parent / unquote(parts.path) if parts.path else site / page
            file = (target / "index.html" if target.is_dir() else target).resolve()
            assert file.is_file(), f"{page} links to {link}"
            if parts.fragment and file.suffix == ".html":
                assert unquote(parts.fragment) in pages[str(file.relative_to(site))].ids, f"{page} links to {link}"
            checked += 1
    assert checked > 1000


def test_formulas_are_mathml(pages: dict[str, Markup], site: Path) -> None:
    written = (DOCS / "methods.md").read_text()
    html = (site / "methods" / "index.html").read_text()
    displayed, inline = re.findall(r"\$\$.+?\$\$", written), re.findall(r"(?<!\$)\$[^$\n]+\$(?!\$)", written)
    assert len(displayed) >= len(methods.NAMES)
    assert html.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block"') == len(displayed)
    assert html.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline"') == len(inline)
    assert not any("arithmatex" in markup.classes for markup in pages.values())


def test_every_method_is_drawn_by_our_own_code(pages: dict[str, Markup], site: Path) -> None:
    outline = Outline({name: {"final": 1, "stage2": 2} for name in "ab"})
    drawn = {name: methods.get(name)(outline).to_svg() for name in methods.NAMES}
    shown = [name for name in drawn if f"../pictures/{name}.svg" in pages["methods/index.html"].loaded]
    assert {drawn[name] for name in shown} == set(drawn.values())
    assert set(drawn) - set(shown) == {"cml"}  # with one student it is kd
    for name, picture in drawn.items():
        assert (site / "pictures" / f"{name}.svg").read_text() == picture
    # The theme would fetch Mermaid's script from another host for a single element of this class.
    assert not any("mermaid" in markup.classes for markup in pages.values())


def test_every_public_name_is_in_the_reference(pages: dict[str, Markup]) -> None:
    ids = set().union(*(markup.ids for page, markup in pages.items() if page.startswith("api/")))
    names = [name for name in codistill.__all__ if name != "__version__"]
    assert len(names) >= 9
    for name in names:
        what = getattr(codistill, name)
        assert (what.__name__ if isinstance(what, ModuleType) else f"{what.__module__}.{name}") in ids


def test_a_page_that_the_navigation_leaves_out_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """It is a warning, which `--strict` makes an error."""
    config = load_config(str(ROOT / "mkdocs.yml"))
    files = get_files(config)
    assert len(files.documentation_pages()) >= 20
    for name in ("forgotten.md", "also-forgotten.md"):
        files.append(File(name, config.docs_dir, config.site_dir, config.use_directory_urls))
    with caplog.at_level(logging.WARNING, "mkdocs"):
        get_navigation(files, config)
    (warning,) = (record.getMessage() for record in caplog.records if "not included" in record.getMessage())
    assert "- forgotten.md" in warning
    assert "- also-forgotten.md" in warning


def test_a_flowchart_that_nobody_can_draw_is_refused() -> None:
    hooks = runpy.run_path(str(DOCS / "site" / "hooks.py"))
    with pytest.raises(hooks["PluginError"], match=r"some\.md: a flowchart that is not of a method"):
        hooks["_picture"]("flowchart LR\n  a --> b", "some.md")
