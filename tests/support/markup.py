"""HTML as tests read it: what a page loads, where it leads, and what it says."""

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path


@dataclass
class Markup:
    loaded: list[str] = field(default_factory=list)
    """Addresses that a browser asks for by itself."""
    links: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    tags: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, html: str) -> "Markup":
        reader = _Reader()
        reader.feed(html)
        reader.close()
        return reader.found

    @classmethod
    def read(cls, file: Path) -> "Markup":
        return cls.of(file.read_text(encoding="utf-8"))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found = Markup()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.found.tags.append(tag)
        self.found.classes.update(given.get("class", "").split())
        self.found.ids.update(given[name] for name in ("id", "name") if name in given)
        self.found.loaded += [given[name] for name in ("src", "srcset", "poster", "data") if name in given]
        if "href" in given:
            (self.found.links if tag == "a" else self.found.loaded).append(given["href"])

    def handle_data(self, data: str) -> None:
        self.found.texts.append(data)
