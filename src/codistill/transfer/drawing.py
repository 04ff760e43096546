"""Graphs as text, SVG and Mermaid. Imports no torch.

The colours are Okabe and Ito's, which colour-blind readers can distinguish; different-stage edges are dashed as well.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

    from codistill.transfer.graph import Classifier, TransferGraph

SAME_STAGE, OTHER_STAGE = "same", "other"
STROKE = {SAME_STAGE: "#0072B2", OTHER_STAGE: "#D55E00"}

ROW, GAP = 92.0, 170.0


@dataclass(frozen=True)
class Link:
    """One drawn line: a transfer, or two opposite ones of the same weight."""

    source: "Classifier"
    learner: "Classifier"
    weight: float
    both_ways: bool

    @property
    def kind(self) -> str:
        return SAME_STAGE if self.source.stage == self.learner.stage else OTHER_STAGE

    @property
    def title(self) -> str:
        return f"{self.source}{'<->' if self.both_ways else '->'}{self.learner}: {self.weight:g}"


def links(graph: "TransferGraph") -> list[Link]:
    """The lines to draw: opposite transfers of the same weight share one."""
    weights = {(transfer.source, transfer.learner): transfer.weight for transfer in graph.transfers}
    index_of = {classifier.name: index for index, classifier in enumerate(graph.outline.classifiers)}
    drawn = []
    for (source, learner), weight in weights.items():
        both_ways = weights.get((learner, source)) == weight
        if not both_ways or index_of[source] < index_of[learner]:
            drawn.append(Link(graph.outline[source], graph.outline[learner], weight, both_ways))
    return drawn


def summary(graph: "TransferGraph") -> str:
    """``18 transfers, labels on 6 classifiers, temperature 1``, and which networks are frozen."""
    parts = [_count(len(graph.transfers), "transfer"), f"labels on {_count(len(graph.labels), 'classifier')}"]
    parts.append(f"temperature {graph.temperature:g}{', times its square' if graph.t_squared else ''}")
    if graph.ramp:
        parts.append(f"weights ramped between {graph.ramp.begin:.0%} and {graph.ramp.end:.0%} of the training")
    return ", ".join(parts + [f"{network} is frozen" for network in graph.frozen])


def shares(graph: "TransferGraph") -> dict[str, tuple[str, str]]:
    """Each learner's teacher share and scale as text, those of a ramp as ``0 → 0.75``."""
    initial = graph.ramp.initial if graph.ramp else graph
    return {
        name: (_change(initial.shares.get(name, 0.0), share), _change(initial.scales.get(name, 0.0), scale))
        for (name, share), scale in zip(graph.shares.items(), graph.scales.values(), strict=True)
    }


def _change(first: float, last: float) -> str:
    return " → ".join(dict.fromkeys((f"{first:.3g}", f"{last:.3g}")))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def matrix(graph: "TransferGraph") -> str:
    """One row per learner, one column per source, the labels first; a dot means no edge. Then the learner's shares."""
    names = [classifier.name for classifier in graph.classifiers]
    weights, shares_of = graph.weights, shares(graph)
    table = [["learner", "labels", *names, "share", "scale"]]
    for learner in names:
        row = [weights.get(f"{source}->{learner}") for source in ("labels", *names)]
        cells = ["·" if weight is None else f"{weight:g}" for weight in row]
        table.append([learner, *cells, *shares_of.get(learner, ("·", "·"))])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in table
    ]
    return "\n".join([*lines, summary(graph)])


def to_mermaid(graph: "TransferGraph") -> str:
    """A flowchart with a box per network, which GitHub and most notebooks draw."""
    ids = {classifier.name: f"c{index}" for index, classifier in enumerate(graph.classifiers)}
    lines = ["flowchart LR", "  labels([labels])"]
    for index, network in enumerate(graph.outline.networks):
        lines.append(f'  subgraph n{index}["{_mermaid_text(network)}"]')
        lines += [
            f'    {ids[classifier.name]}["{_mermaid_text(f"C{classifier.stage} {classifier.exit}")}"]'
            for classifier in graph.classifiers
            if classifier.network == network
        ]
        lines.append("  end")
    lines += [f"  labels -.->{_mermaid_weight(weight)} {ids[name]}" for name, weight in graph.labels.items()]
    strokes: dict[str, list[str]] = {SAME_STAGE: [], OTHER_STAGE: []}
    for number, link in enumerate(links(graph), start=len(graph.labels)):
        arrow = "<-->" if link.both_ways else "-->"
        lines.append(f"  {ids[link.source.name]} {arrow}{_mermaid_weight(link.weight)} {ids[link.learner.name]}")
        strokes[link.kind].append(str(number))
    lines += [f"  linkStyle {','.join(where)} stroke:{STROKE[kind]}" for kind, where in strokes.items() if where]
    return "\n".join(lines)


def _mermaid_weight(weight: float) -> str:
    return "" if weight == 1 else f"|{weight:g}|"


def _mermaid_text(text: str) -> str:
    return "".join(char if char.isalnum() or char in " _-." else f"#{ord(char)};" for char in text)


def to_svg(graph: "TransferGraph") -> str:
    """Networks as lanes, classifiers by stage with the output on top, a ``y`` on those that learn from the labels."""
    template = template_environment("codistill.transfer").get_template("graph.svg.jinja")
    return template.render(graph=graph, picture=_Picture(graph), summary=summary(graph))


@cache
def template_environment(package: str) -> "Environment":
    """Jinja for the templates of a package; ``g`` is the filter that writes numbers, as in f-strings."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader(package, "templates")
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=True
    )
    environment.filters["g"] = "{:g}".format
    return environment


class _Picture:
    """The layout of a graph, for the template."""

    top, node_height = 64.0, 44.0

    def __init__(self, graph: "TransferGraph") -> None:
        self.graph = graph
        self.links, self.shares = links(graph), shares(graph)
        self.stages = sorted({classifier.stage for classifier in graph.classifiers})
        longest = max(len(name) for c in graph.outline.classifiers for name in (c.exit, c.network))
        self.node_width = max(120.0, 8.0 * longest + 72)
        self.left = 112.0 if any(link.source.network == link.learner.network for link in self.links) else 56.0
        self.anchors = self._anchors()
        networks = len(graph.outline.networks)
        self.width = 2 * self.left + networks * (self.node_width + GAP) - GAP
        self.height = self.top + ROW * len(self.stages) + 56

    def x(self, network: str) -> float:
        return self.left + self.graph.outline.networks.index(network) * (self.node_width + GAP)

    def y(self, stage: int) -> float:
        return self.top + ROW * (self.stages.index(stage) + 0.5)

    def _sides(self, link: Link) -> tuple[str, str]:
        """The sides at which a link leaves its source and enters its learner; inside a network both are the same."""
        first, second = self.x(link.source.network), self.x(link.learner.network)
        if first == second:
            return ("left", "left") if first == self.left else ("right", "right")
        return ("right", "left") if first < second else ("left", "right")

    def _bow(self, link: Link) -> float:
        """How far a horizontal line that passes another lane is bent, so as not to cross that lane's classifier."""
        distance = abs(self.x(link.source.network) - self.x(link.learner.network))
        return 62.0 if link.kind == SAME_STAGE and distance > 1.5 * (self.node_width + GAP) else 0.0

    def _anchors(self) -> dict[tuple[Link, str], tuple[float, float]]:
        """The end points of all links, spread over the side of their classifier in the order of their other ends."""
        ends: dict[tuple[Classifier, str], list[tuple[float, float, Link, str]]] = {}
        for link in self.links:
            way_there, way_back = (link.source, link.learner, "source"), (link.learner, link.source, "learner")
            for (here, there, role), side in zip((way_there, way_back), self._sides(link), strict=True):
                going_to = self.y(there.stage) + self._bow(link), self.x(there.network)
                ends.setdefault((here, side), []).append((*going_to, link, role))
        anchors = {}
        for (classifier, side), found in ends.items():
            x = self.x(classifier.network) + (self.node_width if side == "right" else 0)
            step = min(11.0, (self.node_height - 12) / max(1, len(found) - 1))
            top = self.y(classifier.stage) - step * (len(found) - 1) / 2
            for index, (_, _, link, role) in enumerate(sorted(found, key=lambda end: end[:2])):
                anchors[link, role] = x, top + step * index
        return anchors

    def path(self, link: Link) -> str:
        (x1, y1), (x2, y2) = self.anchors[link, "source"], self.anchors[link, "learner"]
        leaving, entering = (1 if side == "right" else -1 for side in self._sides(link))
        reach = 30 + abs(y2 - y1) * 0.15 if leaving == entering else min(80.0, abs(x2 - x1) * 0.4)
        x3, x4, bow = x1 + leaving * reach, x2 + entering * reach, self._bow(link)
        return f"M{x1:g},{y1:g} C{x3:g},{y1 + bow:g} {x4:g},{y2 + bow:g} {x2:g},{y2:g}"
