"""The sections of a full audit: each takes a model and prompts and returns its quantities, per instance.

A section is one family of measurements and can be run, stored and repeated by itself. What a model or a set of prompts
does not allow is in the result with its reason.
"""

from collections.abc import Callable

from plga_jax.audit import protocol_sections, tensor_sections
from plga_jax.audit.quantities import Quantity
from plga_jax.audit.subject import Subject

SECTIONS: dict[str, Callable[[Subject], list[Quantity]]] = {
    "spectra": tensor_sections.spectra_of_tensors,
    "operators": tensor_sections.operators,
    "order": tensor_sections.order_parameters,
    "gram": tensor_sections.gram,
    "row_map": tensor_sections.row_map_contraction,
    "dag": tensor_sections.acyclicity,
    "decoding": protocol_sections.cached_decoding,
    "prefix": protocol_sections.prefixes,
    "losses": protocol_sections.losses,
    "scoring": protocol_sections.protocols,
    "budget": protocol_sections.perturbation,
}
"""By name, in the order of a report."""

CONTROL_SECTIONS = ("spectra", "operators", "order", "row_map", "dag")
"""What is taken of fresh models too: the sections whose values only mean something beside those of an untrained one."""
