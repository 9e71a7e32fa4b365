"""One factory of device meshes: the five axes this project knows, always all of them, always Auto.

An axis nobody asked for has size 1, so a `PartitionSpec` may name any of the five on any mesh.
"""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "seq", "tensor", "expert")


def make_mesh(shape: Mapping[str, int] | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over all of `devices`.

    Args:
        shape: sizes by axis name, any subset of `AXES` in any order; one size may be −1, which
            takes what is left. None puts every device on "data".
        devices: the devices to use, all of them; None means all devices of the process group.

    Returns:
        A mesh with the axes of `AXES` in that order, every axis of type Auto (`jax.make_mesh` alone
        would make them Explicit).

    Raises:
        ValueError: an unknown axis, a size below 1 that is not a single −1, or a product that is
            not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = dict({"data": -1} if shape is None else shape)
    for name, size in sizes.items():
        if name not in AXES:
            raise ValueError(f"unknown mesh axis {name!r}: the axes are {', '.join(AXES)}")
        if size != -1 and size < 1:
            raise ValueError(f"mesh axis {name}={size}: a size is at least 1, or -1 to infer it")
    inferred = [name for name, size in sizes.items() if size == -1]
    if len(inferred) > 1:
        raise ValueError(f"only one mesh axis can be inferred by -1, got {' and '.join(inferred)}")
    asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
    known = math.prod(size for size in sizes.values() if size != -1)
    if inferred:
        if len(devices) % known:
            raise ValueError(
                f"mesh {asked}: {len(devices)} devices cannot be divided by {known}; "
                "choose sizes whose product divides the number of devices"
            )
        sizes[inferred[0]] = len(devices) // known
    elif known != len(devices):
        raise ValueError(
            f"mesh {asked} needs {known} devices, {len(devices)} are there; "
            "change a size, give one as -1, or pass the devices to use"
        )
    full = tuple(sizes.get(name, 1) for name in AXES)
    return jax.make_mesh(full, AXES, (AxisType.Auto,) * len(AXES), devices=devices)


def parse_mesh(text: str) -> dict[str, int]:
    """Reads "data=2,fsdp=4" into the `shape` of `make_mesh`.

    Args:
        text: comma-separated name=size pairs.

    Returns:
        Sizes by name; `make_mesh` checks the names.

    Raises:
        ValueError: a pair that is not name=integer, or a name given twice.
    """
    shape = {}
    for pair in text.split(","):
        name, _, size = (part.strip() for part in pair.partition("="))
        if not name or not size.removeprefix("-").isdigit():
            raise ValueError(f"mesh {text!r}: {pair!r} is not NAME=SIZE, as in data=2,fsdp=4")
        if name in shape:
            raise ValueError(f"mesh {text!r}: axis {name} is given twice")
        shape[name] = int(size)
    return shape
