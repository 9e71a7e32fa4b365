"""The recall star: one token and the far tokens that sampling lets it see, as a graph to look at.

The published export has two faults that this one does not: a node of the name -1 where the last clique has no member,
and texts from another tokenisation than the one that is read. Here texts are given for the very tokens of the context,
and one that does not fit is refused.
"""

import dataclasses
import os
import pathlib
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import numpy as np

from plga_jax.audit.report import write_text
from ris_jax.geometry import PublishedGeometry

_NAMESPACE = "http://graphml.graphdrawing.org/xmlns"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallStar:
    """A star: the row in the middle, the tokens it samples around it. Undirected.

    Attributes:
        row: index of the token in the middle.
        nodes: indices of all tokens in it, ascending, the row included.
        texts: the text of each node.
        edges: the nodes that are tied to the row: those outside of its window.
        mass: float64 [L, edges], the attention that each layer gives along each edge; None when it was not measured.
    """

    row: int
    nodes: tuple[int, ...]
    texts: tuple[str, ...]
    edges: tuple[int, ...]
    mass: np.ndarray | None = None

    def to_dot(self) -> str:
        """The star as a Graphviz document."""
        lines = ["graph recall {", "  node [shape=box];"]
        for node, text in zip(self.nodes, self.texts):
            lines.append(f"  {node} [label={_quoted(f'[{node}] {text}')}];")
        for i, node in enumerate(self.edges):
            lines.append(f"  {self.row} -- {node} [weight={self._weight(i):.6g}{self._layers(i)}];")
        return "\n".join([*lines, "}"]) + "\n"

    def to_graphml(self) -> str:
        """The star as a GraphML document: nodes carry `index` and `text`, edges `weight` and the mass of each layer."""
        root = ET.Element("graphml", xmlns=_NAMESPACE)
        layers = 0 if self.mass is None else len(self.mass)
        keys = [("node", "index", "int"), ("node", "text", "string"), ("edge", "weight", "double")]
        for owner, name, kind in [*keys, *(("edge", f"layer_{layer}", "double") for layer in range(layers))]:
            ET.SubElement(root, "key", {"id": name, "for": owner, "attr.name": name, "attr.type": kind})
        graph = ET.SubElement(root, "graph", id="recall", edgedefault="undirected")
        for node, text in zip(self.nodes, self.texts):
            element = ET.SubElement(graph, "node", id=f"n{node}")
            _data(element, "index", str(node))
            _data(element, "text", _printable(text))
        for i, node in enumerate(self.edges):
            element = ET.SubElement(graph, "edge", source=f"n{self.row}", target=f"n{node}")
            _data(element, "weight", repr(self._weight(i)))
            for layer in range(layers):
                _data(element, f"layer_{layer}", repr(float(self.mass[layer, i])))
        ET.indent(root)
        return ET.tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n"

    def write(self, path: str | os.PathLike) -> None:
        """Writes the star, whole or not at all.

        Args:
            path: ends with .dot or .graphml, which decides the format.

        Raises:
            ValueError: another ending.
        """
        formats = {".dot": self.to_dot, ".graphml": self.to_graphml}
        suffix = pathlib.Path(path).suffix
        if suffix not in formats:
            raise ValueError(f"{path} must end with one of {', '.join(formats)}.")
        write_text(path, formats[suffix]())

    def _weight(self, edge: int) -> float:
        """1, as published, or the mean attention over layers."""
        return 1.0 if self.mass is None else float(self.mass[:, edge].mean())

    def _layers(self, edge: int) -> str:
        if self.mass is None:
            return ""
        return "".join(f", layer_{layer}={value:.6g}" for layer, value in enumerate(self.mass[:, edge]))


def recall_star(
    geometry: PublishedGeometry, texts: Sequence[str], *, row: int | None = None, mass: np.ndarray | None = None
) -> RecallStar:
    """The star of one token of a context.

    Args:
        geometry: what was sampled.
        texts: the text of each token of the context, in order: exactly those that the model reads.
        row: the token in the middle; None means the last.
        mass: float [L, len(texts)], the attention of the row in each layer, say averaged over heads; None for none.

    Returns:
        The star: nodes are the row and its different samples, edges lead to those farther than the window.

    Raises:
        ValueError: an empty context, one longer than the geometry, a row or a mass that does not fit.
    """
    count = len(texts)
    if not 1 <= count <= geometry.length:
        raise ValueError(f"{count} tokens must be within 1 … {geometry.length}, the window of the geometry.")
    row = count - 1 if row is None else row
    if not 0 <= row < count:
        raise ValueError(f"row = {row} must be one of the {count} tokens.")
    if mass is not None and (np.ndim(mass) != 2 or np.shape(mass)[1] != count):
        raise ValueError(f"mass must have shape [L, {count}], a number for each layer and token; got {np.shape(mass)}.")
    nodes = np.union1d(geometry.samples(row), [row]).tolist()
    edges = [node for node in nodes if row - node > geometry.local]
    return RecallStar(
        row=row,
        nodes=tuple(nodes),
        texts=tuple(texts[node] for node in nodes),
        edges=tuple(edges),
        mass=None if mass is None else np.asarray(mass, np.float64)[:, edges],
    )


def _quoted(text: str) -> str:
    """A DOT string that is shown as `_printable` has it."""
    escaped = _printable(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _printable(text: str) -> str:
    """The text on one line, as in a Python string: line breaks, what XML forbids and backslashes become escapes."""
    return "".join(c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text)


def _data(element: ET.Element, key: str, value: str) -> None:
    ET.SubElement(element, "data", key=key).text = value
