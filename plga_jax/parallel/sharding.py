"""Which mesh axis splits which array axis: rules from axis letters, and the shardings they give.

Parameters carry the letters of their trailing axes as metadata (`nnx.Param(kernel, axes=("D",
"F"))`); whatever is made from a parameter by `jax.tree.map` (a gradient, Adam's moments) keeps
them, so one function serves model, optimizer and train state.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plga_jax.parallel.mesh import AXES

MeshAxes = str | tuple[str, ...] | None


def _as_tuple(names: MeshAxes) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """The mesh axis, or axes, that split each lettered axis of `array_types`; None replicates it.

    Within one array a mesh axis is used once: the axes are visited from left to right and a mesh
    axis already taken is left out. So `ShardingRules(D="fsdp", F="fsdp")` splits the first of D and
    F in every weight that has either. A mesh axis whose size does not divide the array axis is left
    out too (and stays free for the axes further right); `replicated` reports it.
    """

    B: MeshAxes = None
    D: MeshAxes = None
    E: MeshAxes = None
    F: MeshAxes = None
    H: MeshAxes = None
    J: MeshAxes = None
    K: MeshAxes = None
    L: MeshAxes = None
    M: MeshAxes = None
    N: MeshAxes = None
    U: MeshAxes = None
    V: MeshAxes = None
    W: MeshAxes = None
    X: MeshAxes = None

    def __post_init__(self):
        for letter, names in dataclasses.asdict(self).items():
            for name in _as_tuple(names):
                if name not in AXES:
                    raise ValueError(f"rule {letter}={names!r}: {name!r} is not a mesh axis ({', '.join(AXES)})")
            if len(set(_as_tuple(names))) != len(_as_tuple(names)):
                raise ValueError(f"rule {letter}={names!r} names one mesh axis twice")

    def __getitem__(self, letter: str) -> tuple[str, ...]:
        """The mesh axes of a letter; "NH", heads and widths laid out as one axis, goes by its N."""
        letters = {field.name for field in dataclasses.fields(self)}
        if letter[0] not in letters:
            known = "".join(sorted(letters))
            raise ValueError(f"axis letter {letter!r} has no rule; the letters are {known}")
        return _as_tuple(getattr(self, letter[0]))


DATA_PARALLEL = ShardingRules(B=("data", "fsdp"))
"""Every device holds the whole model and a share of the batch."""

FSDP = ShardingRules(B=("data", "fsdp"), D="fsdp", E="fsdp", F="fsdp", H="fsdp", N="fsdp", V="fsdp")
"""Every weight and its optimizer state is split over "fsdp", along the first axis that divides."""


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _split(variable: nnx.Variable, mesh: Mesh, rules: ShardingRules) -> list[tuple[str | None, list, list]]:
    """Per array axis: its letter (None: stacked), the axes that split it, those that do not fit."""
    letters = variable.get_metadata().get("axes") or ()
    shape = variable.shape
    if len(letters) > len(shape):
        letters = ()  # A reduced statistic (a factored moment, say) that inherited the metadata.
    letters = (None,) * (len(shape) - len(letters)) + tuple(letters)
    taken, plan = set(), []
    for letter, size in zip(letters, shape, strict=True):
        used, refused = [], []
        for name in rules[letter] if letter else ():
            if mesh.shape[name] == 1 or name in taken:
                continue
            ways = math.prod(mesh.shape[other] for other in used) * mesh.shape[name]
            (refused if size % ways else used).append(name)
        taken.update(used)
        plan.append((letter, used, refused))
    return plan


def param_shardings(tree: Any, mesh: Mesh, rules: ShardingRules) -> Any:
    """Shardings for every array of a model, an optimizer state or a whole train state.

    Args:
        tree: any pytree; `nnx.Variable` leaves are split by their `axes` metadata, whose letters
            name the trailing axes (leading stacks are replicated); every other leaf is replicated.
            Arrays or `ShapeDtypeStruct`s.
        mesh: where to.
        rules: letters to mesh axes.

    Returns:
        A tree of the same structure with a `NamedSharding` for each array: for `jax.device_put`,
        `jax.jit` and restoring.

    Raises:
        ValueError: a parameter has a letter that the rules do not know.
    """

    def place(leaf):
        if not _is_variable(leaf):
            return NamedSharding(mesh, PartitionSpec())
        parts = [tuple(used) or None for _, used, _ in _split(leaf, mesh, rules)]
        return leaf.replace(NamedSharding(mesh, PartitionSpec(*parts)))

    return jax.tree.map(place, tree, is_leaf=_is_variable)


def replicated(tree: Any, mesh: Mesh, rules: ShardingRules) -> Iterator[str]:
    """Reports the parameters that a mesh axis should have split but divides nowhere.

    Args:
        tree: as in `param_shardings`.
        mesh: where to.
        rules: letters to mesh axes.

    Yields:
        One sentence each: "layers/up/bias [F=170] is not divided by fsdp=8: every device holds it".
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_variable)[0]:
        if not _is_variable(leaf):
            continue
        plan = _split(leaf, mesh, rules)
        used = {axis for _, used, _ in plan for axis in used}
        for axis in dict.fromkeys(axis for *_, refused in plan for axis in refused):
            if axis not in used:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                sizes = ", ".join(
                    f"{letter}={size}"
                    for (letter, _, refused), size in zip(plan, leaf.shape, strict=True)
                    if axis in refused
                )
                ways = f"{axis}={mesh.shape[axis]}"
                yield f"{name} [{sizes}] is not divided by {ways}: every device holds it"


def batch_sharding(mesh: Mesh, rules: ShardingRules) -> NamedSharding:
    """The sharding of every array of a batch: rows by the rule of B, everything else whole.

    Args:
        mesh: where to.
        rules: letters to mesh axes.

    Returns:
        A sharding for arrays [B, ...].
    """
    return NamedSharding(mesh, PartitionSpec(rules["B"] or None))


def batch_ways(mesh: Mesh, rules: ShardingRules) -> int:
    """Into how many shares the batch axis is cut: a batch size must be a multiple of it."""
    return math.prod(mesh.shape[name] for name in rules["B"])
