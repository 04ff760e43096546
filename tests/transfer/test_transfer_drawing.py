import re
import xml.etree.ElementTree as ET

from codistill.transfer import methods
from codistill.transfer.graph import Outline, Transfer, TransferGraph

SVG = "{http://www.w3.org/2000/svg}"
TWINS = Outline({name: {"final": 1, "stage2": 2, "stage1": 3} for name in "ab"})


def test_the_matrix_by_hand() -> None:
    outline = Outline({"a": {"final": 1}, "net2": {"final": 1, "stage2": 2}})
    graph = TransferGraph(outline, {"net2/final": 0.5}, [("a/final", "net2/final")], temperature=2.0)
    assert graph.matrix().splitlines() == [
        "learner     labels  a/final  net2/final  share  scale",
        "a/final          ·        ·           ·      ·      ·",
        "net2/final     0.5        1           ·  0.667    1.5",
        "1 transfer, labels on 1 classifier, temperature 2, a is frozen",
    ]
    assert str(graph) == graph.matrix()


def test_a_ramp_shows_its_first_and_last_share_and_the_edges_that_fade_out() -> None:
    graph = methods.dml(Outline({"a": {"final": 1}, "b": {"final": 1}}))
    ramped = graph.with_share(0.0, scale=1, initial_share=0.75, initial_scale=4, begin=0.2, end=0.6)
    assert ramped.matrix().splitlines() == [
        "learner  labels  a/final  b/final     share  scale",
        "a/final       1        ·        0  0.75 → 0  4 → 1",
        "b/final       1        0        ·  0.75 → 0  4 → 1",
        "2 transfers, labels on 2 classifiers, temperature 1, weights ramped between 20% and 60% of the training",
    ]
    titles = [node.findtext(f"{SVG}title") for node in ET.fromstring(ramped.to_svg()).iter(f"{SVG}rect")]
    assert titles.count("teacher share 0.75 → 0, scale 4 → 1") == 2


def edge_classes(svg: str) -> list[str]:
    root = ET.fromstring(svg)
    return sorted(path.get("class", "") for path in root.iter(f"{SVG}path") if path.find(f"{SVG}title") is not None)


def test_the_svg_shows_every_edge_node_and_label() -> None:
    # Opposite edges of one weight share a line, so DCM's 6 + 12 edges are 3 + 6 lines.
    assert edge_classes(methods.dcm(TWINS).to_svg()) == ["edge other"] * 6 + ["edge same"] * 3
    assert edge_classes(methods.complete(TWINS).to_svg()) == ["edge other"] * 12 + ["edge same"] * 3
    lopsided = methods.dml(TWINS).reweighted({"a/final->b/final": 0.5})
    assert edge_classes(lopsided.to_svg()) == ["edge same"] * 2
    root = ET.fromstring(methods.dcm(TWINS).to_svg())
    classes = [element.get("class") for element in root.iter()]
    assert classes.count("node") == 6
    assert classes.count("pill") == 6 + 1  # the legend has one
    assert "frozen" in methods.kd(TWINS).to_svg()


def test_the_svg_tells_screen_readers_what_it_shows() -> None:
    root = ET.fromstring(methods.kd(TWINS)._repr_html_())
    assert root.get("role") == "img"
    assert root.get("aria-label") == root.findtext(f"{SVG}title") == "Transfer graph of a, b"
    described = root.findtext(f"{SVG}desc") or ""
    assert "1 transfer, " in described
    assert "a/final->b/final" in described


def test_names_are_escaped() -> None:
    nasty = '<script>&"'
    outline = Outline({nasty: {"final": 1}, "b": {"final": 1}})
    graph = methods.dml(outline)
    root = ET.fromstring(graph.to_svg())
    assert nasty in [text.text for text in root.iter(f"{SVG}text")]
    assert not list(root.iter(f"{SVG}script"))
    assert "<script" not in graph.to_mermaid()
    assert 'subgraph n0["#60;script#62;#38;#34;"]' in graph.to_mermaid()


def test_mermaid_has_every_edge_once() -> None:
    graph = TransferGraph(
        TWINS,
        {"a/final": 1.0, "b/final": 0.5},
        [Transfer("a/final", "b/final", 0.5), ("a/stage2", "b/final"), ("b/final", "a/stage2")],
    )
    lines = graph.to_mermaid().splitlines()
    assert lines[-6:] == [
        "  labels -.-> c0",
        "  labels -.->|0.5| c2",
        "  c0 -->|0.5| c2",
        "  c1 <--> c2",
        "  linkStyle 2 stroke:#0072B2",
        "  linkStyle 3 stroke:#D55E00",
    ]
    arrows = re.findall(r"<-->|(?<!<)-->", methods.complete(TWINS).to_mermaid())
    assert arrows == ["<-->"] * 15
