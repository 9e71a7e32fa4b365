"""Figures of the collapse, as Matplotlib `Figure` objects.

No pyplot: nothing here keeps a global figure or picks a backend, so the functions are safe in
threads, tests and servers. Save with `figure.savefig(path)`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# Okabe and Ito's palette, told apart under the common forms of colour blindness. Its yellow is left
# out: too pale for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))


def training_curves(runs: Mapping[str, Mapping[str, Sequence]], threshold: float | None = None) -> Figure:
    """Loss and order parameter of several runs against steps.

    Colour and marker tell the run, the dash tells the layer: it can be read without colour.

    Args:
        runs: from a run's label to its series: "loss_steps" [n] and "loss" [n] (training, nats per
            token), "val_steps" [v] and "val_loss" [v] (may be absent), "steps" [p] and "m_A" [p, L]
            of the probes.
        threshold: level of the collapse criterion to draw across the order parameter, None for
            none.

    Returns:
        A figure with two axes over one step axis; the order parameter's is logarithmic.

    Raises:
        ValueError: if there is no run, or more runs than colours.
    """
    if not 1 <= len(runs) <= len(COLOURS):
        raise ValueError(f"can draw 1 to {len(COLOURS)} runs, got {len(runs)}; plot some at a time")
    figure = Figure(figsize=(7.5, 7.0), layout="constrained")
    loss_axes, order_axes = figure.subplots(2, 1, sharex=True)
    for colour, marker, (label, run) in zip(COLOURS, MARKERS, runs.items()):
        loss_axes.plot(run["loss_steps"], run["loss"], color=colour, lw=0.8, alpha=0.45)
        if len(run.get("val_loss", ())):
            style = {"color": colour, "marker": marker, "ms": 5}
            loss_axes.plot(run["val_steps"], run["val_loss"], **style, label=label)
        else:
            loss_axes.lines[-1].set(alpha=1.0, label=label)
        order = np.asarray(run["m_A"], np.float64)
        for layer in range(order.shape[1]):
            order_axes.plot(
                run["steps"],
                _positive(order[:, layer]),
                color=colour,
                ls=DASHES[layer % len(DASHES)],
                marker=marker,
                ms=4,
                label=f"{label}, layer {layer}",
            )
    if threshold is not None:
        order_axes.axhline(threshold, color="0.4", lw=1)
        order_axes.annotate(
            f"collapsed below {threshold:g}",
            (1, threshold),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize="small",
            color="0.3",
        )
    loss_axes.set(ylabel="loss, nats per token", title="Training (thin) and validation loss")
    order_axes.set(
        xlabel="optimiser step",
        ylabel="order parameter m(A)",
        yscale="log",
        title="Relative RMS difference of A between two inputs",
    )
    for axes in (loss_axes, order_axes):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", handlelength=3.5)
    return figure


def spectra(tensors: Mapping[str, Mapping[str, np.ndarray]]) -> Figure:
    """Singular values relative to the largest, one panel per tensor and layer.

    Args:
        tensors: from a tensor's name ("A", "A_LM") to {model label: singular values [L, ..., H],
            largest first}. The line is the
            median over the axes between, the band runs from their least to their largest.

    Returns:
        A figure with a row of panels per tensor and a column per layer; the value axis is
        logarithmic.

    Raises:
        ValueError: if there is nothing to draw, more models than colours, or models of different
            depth.
    """
    depths = {np.shape(values)[0] for models in tensors.values() for values in models.values()}
    if len(depths) != 1:
        raise ValueError(f"need tensors of one depth, got depths {sorted(depths)}")
    if (most := max(map(len, tensors.values()))) > len(COLOURS):
        raise ValueError(f"can draw at most {len(COLOURS)} models, got {most}; plot some at a time")
    (depth,) = depths
    figure = Figure(figsize=(1.2 + 3.6 * depth, 0.9 + 2.9 * len(tensors)), layout="constrained")
    panels = figure.subplots(len(tensors), depth, squeeze=False, sharex=True, sharey="row")
    handles = {}
    for row, (name, models) in zip(panels, tensors.items()):
        for style, (label, values) in enumerate(models.items()):
            values = np.asarray(values, np.float64)
            relative = values / np.where(values[..., :1] == 0, 1.0, values[..., :1])
            for layer, axes in enumerate(row):
                instances = relative[layer].reshape(-1, values.shape[-1])
                index = np.arange(1, values.shape[-1] + 1)
                colour, dash = COLOURS[style], DASHES[style % len(DASHES)]
                low, middle, high = np.quantile(instances, [0.0, 0.5, 1.0], axis=0)
                axes.fill_between(index, _positive(low), _positive(high), color=colour, alpha=0.18, lw=0)
                axes.plot(index, _positive(middle), color=colour, ls=dash, label=label)
                handles[label] = Line2D([], [], color=colour, ls=dash)
        for layer, axes in enumerate(row):
            axes.set(yscale="log", title=f"{name}, layer {layer}")
            axes.grid(alpha=0.3)
        row[0].set_ylabel("σᵢ / σ₁")
    for axes in panels[-1]:
        axes.set_xlabel("index i of the singular value")
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles))
    return figure


def operator_maps(operators, title: str = "") -> Figure:
    """Heat maps of the operators G, one panel per layer and head.

    Each panel is divided by its own largest entry, written over it: heads differ in size by orders
    of magnitude.

    Args:
        operators: [L, N, H, H].
        title: written over the figure.

    Returns:
        A figure with a row of panels per layer, a column per head, and one diverging colour scale
        from −1 to 1.

    Raises:
        ValueError: if `operators` is not four-dimensional.
    """
    operators = np.asarray(operators, np.float64)
    if operators.ndim != 4:
        raise ValueError(f"operators must be [L, N, H, H], got {operators.shape}; pick one input")
    depth, heads = operators.shape[:2]
    figure = Figure(figsize=(1.6 + 1.9 * heads, 0.8 + 2.1 * depth), layout="constrained")
    panels = figure.subplots(depth, heads, squeeze=False, sharex=True, sharey=True)
    for layer in range(depth):
        for head in range(heads):
            matrix, axes = operators[layer, head], panels[layer, head]
            size = np.abs(matrix).max()
            # PuOr stays ordered under every form of colour blindness, red-green maps do not.
            image = axes.imshow(matrix / (size or 1.0), cmap="PuOr", vmin=-1, vmax=1, interpolation="nearest")
            axes.set_title(f"layer {layer}, head {head}\nmax|G| = {size:.2g}", fontsize="small")
    for axes in panels[-1]:
        axes.set_xlabel("key side")
    for axes in panels[:, 0]:
        axes.set_ylabel("query side")
    figure.colorbar(image, ax=panels, label="G / max|G|", shrink=0.8)
    if title:
        figure.suptitle(title)
    return figure


def _positive(values: np.ndarray) -> np.ndarray:
    """Leaves a gap at exact zeros, which a logarithmic axis cannot show."""
    values = np.asarray(values, np.float64)
    return np.where(values > 0, values, np.nan)


def by_layer(panels: Mapping[str, Mapping[str, np.ndarray]]) -> Figure:
    """Every instance of some quantities by layer, with the medians marked; one panel per quantity.

    Args:
        panels: from a quantity's title to {model label: values [L, instances]}. Values that a logarithmic axis cannot
            show (exact zeros) are drawn on the lower edge.

    Returns:
        A figure with logarithmic value axes, but for panels that span less than a factor of 100.

    Raises:
        ValueError: if there is nothing to draw, or more models than colours.
    """
    if not panels:
        raise ValueError("there is no quantity to draw; give at least one panel")
    if (most := max(map(len, panels.values()))) > len(COLOURS):
        raise ValueError(f"can draw at most {len(COLOURS)} models, got {most}; plot some at a time")
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1.0 + 3.8 * columns, 0.9 + 3.1 * rows), layout="constrained")
    flat, handles = figure.subplots(rows, columns, squeeze=False).ravel(), {}
    for axes, (title, models) in zip(flat, panels.items()):
        every = np.concatenate([np.asarray(values, np.float64).ravel() for values in models.values()])
        positive = every[np.isfinite(every) & (every > 0)]
        logarithmic = positive.size > 0 and positive.max() > 100 * positive.min()
        floor = positive.min() / 3 if logarithmic else 0.0
        for index, (label, values) in enumerate(models.items()):
            values = np.maximum(np.nan_to_num(np.asarray(values, np.float64), posinf=np.nan), floor)
            offset = 0.16 * (index - (len(models) - 1) / 2)
            layers = np.arange(len(values)) + offset
            style = {"color": COLOURS[index], "marker": MARKERS[index], "ls": ""}
            axes.plot(np.repeat(layers, values.shape[1]), values.ravel(), ms=2.5, alpha=0.3, mew=0, **style)
            axes.plot(layers, np.nanmedian(values, axis=1), ms=6, mec="black", mew=0.6, **style)
            handles[label] = Line2D([], [], ms=6, mec="black", mew=0.6, **style)
        if logarithmic:
            axes.set_yscale("log")
        layers = range(max(len(values) for values in models.values()))
        axes.set(title=title, xlabel="layer", xticks=layers)
        axes.grid(alpha=0.3)
    for axes in flat[len(panels) :]:
        axes.set_axis_off()
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles))
    return figure


def margins(deviations, margins) -> Figure:
    """How far the cache moves the logits, against half the margin that it would have to exceed to change a token.

    Args:
        deviations: [P, steps], largest |logit change| of each step.
        margins: [P, steps], best less second logit.

    Returns:
        A figure of one logarithmic axis over steps; colours tell prompts, dashes tell the two.
    """
    deviations, margins = np.asarray(deviations, np.float64), np.asarray(margins, np.float64)
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for row, (moved, margin) in enumerate(zip(deviations, margins)):
        colour = COLOURS[row % len(COLOURS)]
        axes.plot(_positive(moved), color=colour, ls="-", label=f"deviation, prompt {row}")
        axes.plot(_positive(margin / 2), color=colour, ls=(0, (1, 1.5)), label=f"half margin, prompt {row}")
    axes.set(xlabel="decoded token", ylabel="logits", yscale="log", title="Cached against recomputed decoding")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2, handlelength=3)
    return figure


def gaps(gap) -> Figure:
    """Block less sequential loss by position.

    Args:
        gap: [P, positions], nats.

    Returns:
        A figure of two axes: every prompt's gap with their mean, and its size on a logarithmic axis.
    """
    gap = np.asarray(gap, np.float64)
    figure = Figure(figsize=(7.5, 6.0), layout="constrained")
    signed, size = figure.subplots(2, 1, sharex=True)
    for row in gap:
        signed.plot(row, color=COLOURS[0], lw=0.7, alpha=0.4)
        size.plot(_positive(np.abs(row)), color=COLOURS[0], lw=0.7, alpha=0.4)
    signed.plot(gap.mean(axis=0), color=COLOURS[1], lw=2, label="mean over prompts")
    size.plot(_positive(np.median(np.abs(gap), axis=0)), color=COLOURS[1], lw=2, label="median over prompts")
    signed.axhline(0, color="0.4", lw=1)
    signed.set(ylabel="nats", title="Block less sequential loss: below 0, later tokens help")
    size.set(xlabel="position", ylabel="|gap|, nats", yscale="log")
    for axes in (signed, size):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure
