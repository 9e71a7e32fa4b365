"""Sections of an audit that look at deductive tensors: spectra, operators, order parameters, Gram, row map, cycles."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from plga_jax.audit import commutant, layer_norm, notears, order, row_map, spectra, twirl
from plga_jax.audit.quantities import Quantity
from plga_jax.audit.subject import EVERY_HEAD, NO_LEARNER, ONE_HEAD, ONE_PROMPT, Subject, deduce
from plga_jax.generate import generate
from plga_jax.models.pldr_layers import OPERATORS
from plga_jax.ops.power_law import FLOOR
from plga_jax.ops.sampling import SamplingConfig


def spectra_of_tensors(subject: Subject) -> list[Quantity]:
    """Singular values, ranks and the sameness of rows and heads of A, A_LM, A_P and G; the Perron root of A_LM."""
    found = []
    for name in OPERATORS:
        if name not in subject.deduced:
            found.append(Quantity.omitted(f"{name}.singular_values", spectra.singular_values, NO_LEARNER))
            continue
        found += _spectra(name, subject.deduced[name].astype(np.float64), EVERY_HEAD)
    if "A_LM" in subject.deduced:
        positive = subject.deduced["A_LM"].astype(np.float64)
        root, gap = spectra.perron(positive)
        found += [
            Quantity.of("A_LM.perron_root", spectra.perron, root, EVERY_HEAD),
            Quantity.of("A_LM.perron_gap_ratio", spectra.perron, gap, EVERY_HEAD, "|λ2| / ρ: the gap is 1 less this"),
            Quantity(name="A_LM.least_entry", label="measured", values=positive.min(axis=(-2, -1)), axes=EVERY_HEAD),
            Quantity(name="A_LM.largest_entry", label="measured", values=positive.max(axis=(-2, -1)), axes=EVERY_HEAD),
            Quantity(
                name="A_LM.dead",
                label="measured",
                values=np.all(positive <= FLOOR * (1 + 2.0**-20), axis=(-2, -1)).astype(np.int64),
                axes=EVERY_HEAD,
                note="1: every entry is at the floor of 1e-9, so the head's operator is a constant",
            ),
        ]
    return found


def _spectra(name: str, matrices: np.ndarray, axes: tuple[str, ...]) -> list[Quantity]:
    found = [
        Quantity.of(
            f"{name}.singular_values", spectra.singular_values, spectra.singular_values(matrices), (*axes, "index")
        ),
        Quantity.of(f"{name}.rank_one_ratio", spectra.rank_one_ratio, spectra.rank_one_ratio(matrices), axes),
        Quantity.of(f"{name}.numerical_rank", spectra.numerical_rank, spectra.numerical_rank(matrices), axes),
        *(
            Quantity.of(
                f"{name}.entropy_rank_{kind}", spectra.entropy_rank, spectra.entropy_rank(matrices, kind=kind), axes
            )
            for kind in ("nuclear", "energy")
        ),
        Quantity.of(
            f"{name}.row_variance_ratio", spectra.row_variance_ratio, spectra.row_variance_ratio(matrices), axes
        ),
    ]
    if matrices.shape[-3] < 2:
        return [*found, Quantity.omitted(f"{name}.cross_head_rms", spectra.cross_head_rms, ONE_HEAD)]
    heads = spectra.cross_head_rms(matrices)
    return [*found, Quantity.of(f"{name}.cross_head_rms", spectra.cross_head_rms, heads, axes, "heads 1… against 0")]


def operators(subject: Subject) -> list[Quantity]:
    """What kind of operator G is: how far from commuting with the rotary embedding, how symmetric, how large."""
    return describe_operators(subject.deduced["G_LM"], layout=subject.model.config.rope_layout, axes=EVERY_HEAD)


def describe_operators(G, *, layout: str, axes: tuple[str, ...], alone: bool = False) -> list[Quantity]:
    """The same for operators by themselves, as they lie in a file.

    Args:
        G: [..., H, H].
        layout: rotary planes of the model they belong to; the other layout is measured beside it, as a control.
        axes: names of the leading axes.
        alone: with their spectra and acyclicity values, which a whole audit has in other sections.

    Returns:
        The quantities.
    """
    G = np.asarray(G, np.float64)
    other = {"interleaved": "half", "half": "interleaved"}[layout]
    plus, minus, zero = spectra.signature(G)
    found = [*_spectra("G_LM", G, axes), *_dag("G_LM", G, axes)] if alone else []
    return [
        *found,
        Quantity.of("G_LM.commutant_residual", commutant.residual, commutant.residual(G, layout=layout), axes),
        Quantity.of(
            "G_LM.commutant_residual_control",
            commutant.residual,
            commutant.residual(G, layout=other),
            axes,
            f"negative control: {other} planes, which the model does not use",
        ),
        Quantity.of(
            "G_LM.isotropic_residual",
            commutant.isotropic_residual,
            commutant.isotropic_residual(G.shape[-1]),
            note="of an operator without direction",
        ),
        Quantity.of("G_LM.antisymmetric_share", spectra.antisymmetric_share, spectra.antisymmetric_share(G), axes),
        *(
            Quantity.of(f"G_LM.signature_{name}", spectra.signature, count, axes)
            for name, count in (("plus", plus), ("minus", minus), ("zero", zero))
        ),
        Quantity(name="G_LM.frobenius", label="measured", values=np.linalg.norm(G, axis=(-2, -1)), axes=axes),
        Quantity(name="G_LM.largest_entry", label="measured", values=np.abs(G).max(axis=(-2, -1)), axes=axes),
    ]


def order_parameters(subject: Subject) -> list[Quantity]:
    """The three order parameters: between two sampled continuations of a prompt, and between prompts."""
    if "A" not in subject.deduced:
        return [Quantity.omitted("A.m_runs", order.relative_rms, NO_LEARNER)]
    settings = subject.settings
    spectral = order.spectral(subject.deduced["A"])
    found = [Quantity.of("A.spectral", order.spectral, spectral, ("layer", "prompt"), "from one forward pass")]
    sampling = SamplingConfig(top_p=settings.top_p)
    runs = []
    for run in range(2):
        seeds = [2 * (settings.seed + row) + run for row in range(len(subject.prompts))]
        drawn = generate(
            subject.model,
            subject.prompts.tolist(),
            max_new_tokens=settings.sampled,
            sampling=sampling,
            seed=seeds,
            cache="none",
        ).tokens
        whole = np.concatenate([subject.prompts, np.asarray(drawn, np.int32)], axis=1)
        runs.append(deduce(subject.model, jnp.asarray(whole), OPERATORS))
    forms: tuple[tuple[str, Callable], ...] = (
        ("m", order.relative_rms),
        ("signed", order.symmetrised_signed),
        ("source", order.source_form),
    )
    for name in OPERATORS:
        first, second = (np.asarray(getattr(run, name), np.float64) for run in runs)
        for form, function in forms[:2]:
            values = function(first, second, axis=(2, 3, 4))
            found.append(Quantity.of(f"{name}.{form}_runs", function, values, ("layer", "prompt")))
        found.append(
            Quantity.of(
                f"{name}.source_runs",
                order.source_form,
                order.source_form(first, second),
                (),
                "over all prompts, layers and heads together",
            )
        )
        if len(subject.prompts) < 2:
            found.append(Quantity.omitted(f"{name}.m_prompts", order.relative_rms, ONE_PROMPT))
            continue
        tensors = subject.deduced[name]
        others = np.roll(tensors, -1, axis=1)
        values = order.relative_rms(tensors, others, axis=(2, 3, 4))
        found.append(
            Quantity.of(
                f"{name}.m_prompts", order.relative_rms, values, ("layer", "prompt"), "each prompt against the next"
            )
        )
    return found


def gram(subject: Subject) -> list[Quantity]:
    """What LayerNorm's ε and the rotations do to the Gram: scale error, twirl, stationarity."""
    config, q = subject.model.config, subject.deduced["q"].astype(np.float64)
    length = q.shape[2]
    found = []
    if config.operator == "learned":
        rows = np.einsum("LPTNH,LPTNJ->LPNHJ", q, q)
        errors, proxies = [], []
        for layer in range(config.num_layers):
            norm = row_map.metric_learner(subject.model, layer).gram_norm
            learned = {"scale": np.asarray(norm.scale[...]), "bias": np.asarray(norm.bias[...])}
            errors.append(layer_norm.scale_error(rows[layer], length, epsilon=config.norm_epsilon, **learned))
            proxies.append(layer_norm.scale_error_proxy(rows[layer], length, epsilon=config.norm_epsilon))
        axes, directly = (*EVERY_HEAD, "row"), layer_norm.scale_error
        absolute, relative, proxies = (np.stack(x) for x in (*zip(*errors), proxies))
        found += [
            Quantity.of("layer_norm.absolute_error", directly, absolute, axes, "‖LN(r) − LN(r/S)‖"),
            Quantity.of("layer_norm.relative_error", directly, relative, axes, "over ‖LN(r/S)‖"),
            Quantity.of("layer_norm.error_proxy", layer_norm.scale_error_proxy, proxies, axes, "ε / (2 var(r/S))"),
        ]
    else:
        found.append(Quantity.omitted("layer_norm.absolute_error", layer_norm.scale_error, NO_LEARNER))
    layout, base = config.rope_layout, config.rope_base
    measured = twirl.measure_twirl(q.swapaxes(2, 3), base=base, layout=layout)
    constant, rates = (
        twirl.twirl_constant(config.head_width, base=base),
        twirl.multipliers(config.head_width, length, base=base),
    )
    measure = twirl.measure_twirl
    return [
        *found,
        Quantity.of("twirl.constant", twirl.twirl_constant, constant, (), "C_Θ; averages keep at most C_Θ/S"),
        Quantity.of(
            "twirl.constant_over_length", twirl.twirl_constant, constant / length, (), "below 1 it says something"
        ),
        Quantity.of("twirl.multipliers", twirl.multipliers, rates, ("frequency",), "at the length of the prompts"),
        Quantity.of("twirl.commutant_before", measure, measured.commutant_before, EVERY_HEAD),
        Quantity.of("twirl.commutant_after", measure, measured.commutant_after, EVERY_HEAD),
        Quantity.of("twirl.suppression", measure, measured.suppression, EVERY_HEAD),
        Quantity.of(
            "twirl.suppression_pooled",
            measure,
            measured.pooled_suppression(axis=1),
            ("layer", "head"),
            "of energies summed over prompts: another statistic than the one above",
        ),
        Quantity.of("twirl.stationarity", measure, measured.stationarity, EVERY_HEAD, "0: queries do not drift"),
    ]


def row_map_contraction(subject: Subject) -> list[Quantity]:
    """Jacobians and pairwise ratios of each layer's row map at sampled rows of the prompts' Grams."""
    if subject.model.config.operator != "learned":
        return [Quantity.omitted("row_map.sigma_max", row_map.contraction, NO_LEARNER)]
    settings, prompts = subject.settings, len(subject.prompts)
    jacobians, pairs = row_map.contraction, row_map.pairwise_ratios
    found, within, across = [], [], []
    for layer, q in enumerate(subject.deduced["q"]):
        learner = row_map.metric_learner(subject.model, layer)
        rows = row_map.normalised_rows(learner, q).reshape(prompts, -1, q.shape[-1])  # [P, N·H, H]
        # The same rows of every prompt and layer, so that models and steps of a training can be compared.
        picked = np.random.default_rng(settings.seed).permutation(rows.shape[1])[: settings.jacobian_rows]
        rows = rows[:, np.sort(picked)]
        found.append(row_map.contraction(learner, rows.reshape(-1, rows.shape[-1])))
        ratios = row_map.pairwise_ratios(
            learner, rows.reshape(-1, rows.shape[-1]), np.repeat(np.arange(prompts), rows.shape[1])
        )
        within.append(_extremes(ratios[0]))
        across.append(_extremes(ratios[1]))
    axes, note = ("layer", "sample"), "sampled rows: no certificate"
    quantities = [
        Quantity.of("row_map.sigma_max", jacobians, np.stack([one.largest for one in found]), axes, note),
        Quantity.of("row_map.sigma_min", jacobians, np.stack([one.smallest for one in found]), axes),
        Quantity.of(
            "row_map.unit_sigma_max",
            jacobians,
            np.stack([one.units for one in found]),
            (*axes, "unit"),
            "where the row arrives at the unit; diagnostic only",
        ),
        Quantity.of("row_map.ratio_within", pairs, np.stack(within), ("layer", "extreme"), "min, median, max of pairs"),
    ]
    if prompts < 2:
        return [*quantities, Quantity.omitted("row_map.ratio_across", pairs, ONE_PROMPT)]
    return [
        *quantities,
        Quantity.of("row_map.ratio_across", pairs, np.stack(across), ("layer", "extreme"), "min, median, max of pairs"),
    ]


def _extremes(values: np.ndarray) -> np.ndarray:
    return np.quantile(values, [0.0, 0.5, 1.0]) if values.size else np.full(3, np.nan)


def acyclicity(subject: Subject) -> list[Quantity]:
    """NOTEARS values of A_LM, A_P and G, and the two floors that only A_LM has."""
    width = subject.model.config.head_width
    found = [
        Quantity.of("dag.excess_floor", notears.excess_floor, notears.excess_floor(width), (), "of A_LM"),
        Quantity.of(
            "dag.log_loss_floor",
            notears.log_loss_floor,
            notears.log_loss_floor(),
            (),
            "of A_LM: another floor, of another form",
        ),
    ]
    for name in ("A_LM", "A_P", "G_LM"):
        if name not in subject.deduced:
            found.append(Quantity.omitted(f"{name}.dag_log_loss", notears.log_loss, NO_LEARNER))
            continue
        found += _dag(name, subject.deduced[name], EVERY_HEAD)
    return found


def _dag(name: str, tensors, axes: tuple[str, ...]) -> list[Quantity]:
    return [
        Quantity.of(f"{name}.dag_log_loss", notears.log_loss, notears.log_loss(tensors), axes),
        Quantity.of(f"{name}.dag_excess", notears.excess, notears.excess(tensors), axes, "inf: above 1.8e308"),
    ]
