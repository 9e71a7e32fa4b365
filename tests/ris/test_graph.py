"""The recall star: indices and texts of the context that is read, no ghost node, and files that parsers read back."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from ris_jax.geometry import PublishedGeometry
from ris_jax.graph import recall_star
from ris_jax.mask_stream import MaskStream

# Blocks of 6 leave the last with 5 members: its rows draw a -1, which the published export made a node of.
GEOMETRY = PublishedGeometry(mode="structural", length=65, seeds=3, density=0.05, local=4, anchors=2)
TEXTS = [f"t{i}" for i in range(50)]
NAMESPACE = {"g": "http://graphml.graphdrawing.org/xmlns"}


def last_block_row():
    """A row of the context that has fewer members than its clique has places."""
    samples = MaskStream(GEOMETRY).samples(50)
    return int(np.flatnonzero((samples == -1).any(axis=1))[-1])


def test_star_holds_the_samples_of_its_row():
    row = last_block_row()
    star = recall_star(GEOMETRY, TEXTS, row=row)
    drawn = MaskStream(GEOMETRY, row).samples(1)[0].tolist()
    assert -1 in drawn
    assert star.nodes == tuple(sorted({c for c in drawn if 0 <= c <= row} | {row}))
    assert star.texts == tuple(f"t{node}" for node in star.nodes)
    assert star.edges == tuple(node for node in star.nodes if row - node > 4)
    assert 0 < len(star.edges) < len(star.nodes) - 1, "some nodes are too near for an edge"


def test_row_is_the_last_token_unless_given():
    assert recall_star(GEOMETRY, TEXTS) == recall_star(GEOMETRY, TEXTS, row=49)
    assert recall_star(GEOMETRY, TEXTS[:1]).edges == ()


def test_dot_can_be_read_back():
    star = recall_star(GEOMETRY, TEXTS)
    text = star.to_dot()
    nodes = re.findall(r'^  (\S+) \[label="\[(\d+)\] (.*)"\];$', text, re.M)
    assert [(int(a), int(b), c) for a, b, c in nodes] == [(n, n, f"t{n}") for n in star.nodes]
    edges = re.findall(r"^  (\d+) -- (\d+) \[weight=1\];$", text, re.M)
    assert [(int(a), int(b)) for a, b in edges] == [(49, node) for node in star.edges]
    assert text.startswith("graph recall {\n") and text.endswith("}\n")
    assert len(text.splitlines()) == 3 + len(nodes) + len(edges)


def test_graphml_can_be_read_back():
    mass = np.arange(100.0).reshape(2, 50) / 128
    star = recall_star(GEOMETRY, TEXTS, mass=mass)
    root = ET.fromstring(star.to_graphml().encode())
    nodes = root.findall("g:graph/g:node", NAMESPACE)
    values = [{d.get("key"): d.text for d in node.findall("g:data", NAMESPACE)} for node in nodes]
    assert [node.get("id") for node in nodes] == [f"n{n}" for n in star.nodes]
    assert values == [{"index": str(n), "text": f"t{n}"} for n in star.nodes]
    edges = root.findall("g:graph/g:edge", NAMESPACE)
    assert [(e.get("source"), e.get("target")) for e in edges] == [("n49", f"n{n}") for n in star.edges]
    for edge, node in zip(edges, star.edges):
        data = {d.get("key"): float(d.text) for d in edge.findall("g:data", NAMESPACE)}
        assert data == {"weight": mass[:, node].mean(), "layer_0": mass[0, node], "layer_1": mass[1, node]}
    assert {k.get("id") for k in root.findall("g:key", NAMESPACE)} == {"index", "text", "weight", "layer_0", "layer_1"}


NASTY = ['say "hi"', "a\nb", "back\\slash", "a\\nb", "<b>&amp;", "\x00\x1b", "é漢🙂", "\ud83d", " ", "]];", "end\\"]


def test_texts_are_escaped_without_loss():
    geometry = PublishedGeometry(length=11, density=1.0, seeds=30, local=0, anchors=0)
    star = recall_star(geometry, NASTY)
    assert star.nodes == tuple(range(11)), "thirty seeds of eleven draws see everything"
    dot = star.to_dot()
    labels = re.findall(r'^  \d+ \[label="\[\d+\] ((?:[^"\\]|\\.)*)"\];$', dot, re.M)
    root = ET.fromstring(star.to_graphml().encode())
    texts = [d.text for d in root.findall("g:graph/g:node/g:data[@key='text']", NAMESPACE)]
    assert [re.sub(r"\\(.)", r"\1", label) for label in labels] == texts
    assert len(set(texts)) == 11
    assert texts[:7] == ['say "hi"', r"a\nb", r"back\\slash", r"a\\nb", "<b>&amp;", r"\x00\x1b", "é漢🙂"]


def test_files_are_written_by_their_ending(tmp_path):
    star = recall_star(GEOMETRY, TEXTS)
    star.write(tmp_path / "star.dot")
    star.write(tmp_path / "star.graphml")
    assert (tmp_path / "star.dot").read_text(encoding="utf-8") == star.to_dot()
    assert (tmp_path / "star.graphml").read_text(encoding="utf-8") == star.to_graphml()
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ValueError, match=r"\.dot, \.graphml"):
        star.write(tmp_path / "star.png")


def test_mass_reaches_the_edges_of_dot():
    star = recall_star(GEOMETRY, TEXTS, mass=np.full((2, 50), 0.25))
    assert f"  49 -- {star.edges[0]} [weight=0.25, layer_0=0.25, layer_1=0.25];" in star.to_dot()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(texts=[]), "0 tokens must be within 1 … 65"),
        (dict(texts=["x"] * 66), "66 tokens"),
        (dict(texts=TEXTS, row=50), "row = 50 must be one of the 50 tokens"),
        (dict(texts=TEXTS, row=-1), "row = -1"),
        (dict(texts=TEXTS, mass=np.zeros((2, 49))), r"shape \[L, 50\]"),
        (dict(texts=TEXTS, mass=np.zeros(50)), r"shape \[L, 50\]"),
    ],
)
def test_refuses_what_does_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        recall_star(GEOMETRY, **arguments)
