"""Graphs as text, SVG and Mermaid. Imports no torch.

The colours are Okabe and Ito's, which colour-blind readers can distinguish; different-stage edges are dashed as well.
"""

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codistill.transfer.graph import Classifier, TransferGraph

SAME_STAGE, OTHER_STAGE = "same", "other"
STROKE = {SAME_STAGE: "#0072B2", OTHER_STAGE: "#D55E00"}

NODE_HEIGHT, ROW, GAP, TOP = 44.0, 92.0, 170.0, 64.0

STYLE = """
.tg text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.tg .network { font-weight: 600; font-size: 15px } .tg .quiet { fill: #656d76; font-size: 12px }
.tg .lane { fill: #f6f8fa } .tg .node { fill: #ffffff; stroke: #8c959f }
.tg .pill { fill: #009E73 } .tg .pill-text { fill: #ffffff; font-size: 11px; font-weight: 600 }
.tg .edge { fill: none } .tg .same { stroke: #0072B2 } .tg .other { stroke: #D55E00; stroke-dasharray: 6 4 }
.tg .same-tip { fill: #0072B2 } .tg .other-tip { fill: #D55E00 }
@media (prefers-color-scheme: dark) {
.tg text { fill: #e6edf3 } .tg .quiet { fill: #9198a1 }
.tg .lane { fill: #161b22 } .tg .node { fill: #0d1117; stroke: #6e7681 }
.tg .pill-text { fill: #ffffff }
.tg .same { stroke: #56B4E9 } .tg .same-tip { fill: #56B4E9 }
.tg .other { stroke: #E69F00 } .tg .other-tip { fill: #E69F00 }
}
"""


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
    return _Picture(graph).svg()


class _Picture:
    """The layout of a graph and its SVG elements."""

    def __init__(self, graph: "TransferGraph") -> None:
        self.graph = graph
        self.links, self.shares = links(graph), shares(graph)
        self.stages = sorted({classifier.stage for classifier in graph.classifiers})
        longest = max(len(name) for c in graph.outline.classifiers for name in (c.exit, c.network))
        self.node_width = max(120.0, 8.0 * longest + 72)
        self.left = 112.0 if any(link.source.network == link.learner.network for link in self.links) else 56.0
        self.anchors = self._anchors()

    def svg(self) -> str:
        networks = self.graph.outline.networks
        width = 2 * self.left + len(networks) * (self.node_width + GAP) - GAP
        height = TOP + ROW * len(self.stages) + 56
        body = [
            *(self._lane(network) for network in networks),
            *(f'<text class="quiet" x="8" y="{self._y(stage) + 4:g}">C{stage}</text>' for stage in self.stages),
            *(self._edge(link) for link in self.links),
            *(self._node(classifier) for classifier in self.graph.classifiers),
            self._legend(height - 20),
        ]
        title = f"Transfer graph of {', '.join(networks)}"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="tg" role="img" aria-label="{escape(title)}" '
                f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">',
                f"<title>{escape(title)}</title>",
                f"<desc>{escape(summary(self.graph))}. {escape('; '.join(self.graph.weights))}</desc>",
                f"<style>{STYLE}</style>",
                "<defs>" + "".join(_arrow_tip(kind) for kind in STROKE) + "</defs>",
                *body,
                "</svg>",
            ]
        )

    def _x(self, network: str) -> float:
        return self.left + self.graph.outline.networks.index(network) * (self.node_width + GAP)

    def _y(self, stage: int) -> float:
        return TOP + ROW * (self.stages.index(stage) + 0.5)

    def _sides(self, link: Link) -> tuple[str, str]:
        """The sides at which a link leaves its source and enters its learner; inside a network both are the same."""
        first, second = self._x(link.source.network), self._x(link.learner.network)
        if first == second:
            return ("left", "left") if first == self.left else ("right", "right")
        return ("right", "left") if first < second else ("left", "right")

    def _bow(self, link: Link) -> float:
        """How far a horizontal line that passes another lane is bent, so as not to cross that lane's classifier."""
        distance = abs(self._x(link.source.network) - self._x(link.learner.network))
        return 62.0 if link.kind == SAME_STAGE and distance > 1.5 * (self.node_width + GAP) else 0.0

    def _anchors(self) -> dict[tuple[Link, str], tuple[float, float]]:
        """The end points of all links, spread over the side of their classifier in the order of their other ends."""
        ends: dict[tuple[Classifier, str], list[tuple[float, float, Link, str]]] = {}
        for link in self.links:
            way_there, way_back = (link.source, link.learner, "source"), (link.learner, link.source, "learner")
            for (here, there, role), side in zip((way_there, way_back), self._sides(link), strict=True):
                going_to = self._y(there.stage) + self._bow(link), self._x(there.network)
                ends.setdefault((here, side), []).append((*going_to, link, role))
        anchors = {}
        for (classifier, side), found in ends.items():
            x = self._x(classifier.network) + (self.node_width if side == "right" else 0)
            step = min(11.0, (NODE_HEIGHT - 12) / max(1, len(found) - 1))
            top = self._y(classifier.stage) - step * (len(found) - 1) / 2
            for index, (_, _, link, role) in enumerate(sorted(found, key=lambda end: end[:2])):
                anchors[link, role] = x, top + step * index
        return anchors

    def _edge(self, link: Link) -> str:
        (x1, y1), (x2, y2) = self.anchors[link, "source"], self.anchors[link, "learner"]
        leaving, entering = (1 if side == "right" else -1 for side in self._sides(link))
        reach = 30 + abs(y2 - y1) * 0.15 if leaving == entering else min(80.0, abs(x2 - x1) * 0.4)
        x3, x4, bow = x1 + leaving * reach, x2 + entering * reach, self._bow(link)
        width = min(4.0, max(0.8, 1.6 * link.weight**0.5))
        start = f'marker-start="url(#tg-{link.kind})" ' if link.both_ways else ""
        return (
            f'<path class="edge {link.kind}" stroke-width="{width:g}" {start}marker-end="url(#tg-{link.kind})" '
            f'd="M{x1:g},{y1:g} C{x3:g},{y1 + bow:g} {x4:g},{y2 + bow:g} {x2:g},{y2:g}">'
            f"<title>{escape(link.title)}</title></path>"
        )

    def _lane(self, network: str) -> str:
        x, width, height = self._x(network) - 14, self.node_width + 28, ROW * len(self.stages) + NODE_HEIGHT
        frozen = ' <tspan class="quiet">frozen</tspan>' if network in self.graph.frozen else ""
        return (
            f'<rect class="lane" x="{x:g}" y="{TOP - 44:g}" width="{width:g}" height="{height:g}" rx="14"/>'
            f'<text class="network" x="{x + width / 2:g}" y="{TOP - 18:g}" text-anchor="middle">'
            f"{escape(network)}{frozen}</text>"
        )

    def _node(self, classifier: "Classifier") -> str:
        x, y, weight = self._x(classifier.network), self._y(classifier.stage), self.graph.labels.get(classifier.name)
        pill, pill_width = ("", 0.0) if weight is None else _label_pill(x + 12, y, weight)
        share, scale = self.shares.get(classifier.name, ("·", "·"))
        return (
            f'<rect class="node" x="{x:g}" y="{y - NODE_HEIGHT / 2:g}" width="{self.node_width:g}" '
            f'height="{NODE_HEIGHT:g}" rx="10"><title>teacher share {share}, scale {scale}</title></rect>{pill}'
            f'<text x="{x + pill_width + 22:g}" y="{y + 4.5:g}">{escape(classifier.exit)}</text>'
        )

    def _legend(self, y: float) -> str:
        x = self.left
        pill, _ = _label_pill(x, y - 4, 1.0)
        parts = [pill, f'<text class="quiet" x="{x + 26:g}" y="{y:g}">learns from labels</text>']
        for kind, text, at in ((SAME_STAGE, "same stage", x + 150), (OTHER_STAGE, "different stage", x + 264)):
            if any(link.kind == kind for link in self.links):
                parts.append(f'<path class="edge {kind}" stroke-width="1.6" d="M{at:g},{y - 4:g} h24"/>')
                parts.append(f'<text class="quiet" x="{at + 32:g}" y="{y:g}">{text}</text>')
        return "".join(parts)


def _label_pill(x: float, y: float, weight: float) -> tuple[str, float]:
    """The mark of a classifier with labels, and its width."""
    text = "y" if weight == 1 else f"{weight:g} y"
    width = 12 + 6.5 * len(text)
    return (
        f'<rect class="pill" x="{x:g}" y="{y - 9:g}" width="{width:g}" height="18" rx="9"/>'
        f'<text class="pill-text" x="{x + width / 2:g}" y="{y + 4:g}" text-anchor="middle">{text}</text>'
    ), width


def _arrow_tip(kind: str) -> str:
    return (
        f'<marker id="tg-{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
        f'<path class="{kind}-tip" d="M0,0.6 L8,4 L0,7.4 Z"/></marker>'
    )
