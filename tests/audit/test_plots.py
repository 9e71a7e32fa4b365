"""Figures hold the data they were given, on the axes they claim."""

import sys

import numpy as np
import pytest

from plga_jax.audit import plots


def run(level, steps=9, layers=2):
    rng = np.random.default_rng(int(1e6 * level))
    decay = np.geomspace(0.3, level, steps)
    return {
        "loss_steps": np.arange(50),
        "loss": 2 + 3 * np.exp(-np.arange(50) / 10) + 0.1 * rng.normal(size=50),
        "val_steps": [0, 25, 49],
        "val_loss": [5.0, 2.3, 2.1],
        "steps": np.arange(steps) * 6,
        "m_A": decay[:, None] * np.linspace(1, 2, layers),
    }


def save(figure, tmp_path):
    path = tmp_path / "figure.png"
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_training_curves(tmp_path):
    runs = {"η 1e-2": run(1e-4), "η 1e-3": run(0.2)}
    figure = plots.training_curves(runs, threshold=1e-2)
    loss, order = figure.axes
    assert order.get_yscale() == "log" and "m(A)" in order.get_ylabel() and loss.get_ylabel()
    drawn = {line.get_label(): line for line in order.lines}
    for label, series in runs.items():
        for layer in range(2):
            line = drawn[f"{label}, layer {layer}"]
            np.testing.assert_array_equal(line.get_xdata(), series["steps"])
            np.testing.assert_array_equal(line.get_ydata(), series["m_A"][:, layer])
    named = {line.get_label(): line for line in loss.lines}
    np.testing.assert_array_equal(named["η 1e-2"].get_ydata(), runs["η 1e-2"]["val_loss"])
    assert len({drawn[f"{label}, layer 0"].get_color() for label in runs}) == 2
    assert len({drawn[f"{label}, layer 0"].get_marker() for label in runs}) == 2
    assert any(set(line.get_ydata()) == {1e-2} for line in order.lines)
    save(figure, tmp_path)


def test_training_curves_without_validation_and_with_exact_zeros(tmp_path):
    series = run(0.1) | {"val_steps": [], "val_loss": []}
    series["m_A"][-1] = 0
    figure = plots.training_curves({"only": series})
    loss, order = figure.axes
    assert loss.lines[0].get_label() == "only"
    assert np.isnan(order.lines[0].get_ydata()[-1])
    save(figure, tmp_path)


def test_spectra_draw_the_median_and_the_range(tmp_path):
    rng = np.random.default_rng(0)
    make = lambda: -np.sort(-np.exp(3 * rng.normal(size=(2, 3, 4, 6))), axis=-1)  # noqa: E731
    tensors = {"A": {"init": make(), "trained": make()}, "A_LM": {"init": make()}}
    figure = plots.spectra(tensors)
    assert len(figure.axes) == 4
    panel = figure.axes[1]
    assert panel.get_title() == "A, layer 1" and panel.get_yscale() == "log"
    for line, label in zip(panel.lines, ("init", "trained")):
        values = tensors["A"][label][1].reshape(-1, 6)
        relative = values / values[:, :1]
        np.testing.assert_allclose(line.get_ydata(), np.median(relative, axis=0), rtol=1e-12)
        assert line.get_label() == label
    band = panel.collections[0].get_datalim(panel.transData).bounds
    assert band[0] == 1 and band[2] == 5
    save(figure, tmp_path)


def test_operator_maps_scale_every_panel_by_its_own_maximum(tmp_path):
    operators = np.random.default_rng(1).normal(size=(2, 3, 4, 4))
    operators[0, 0] *= 1e4
    operators[1, 2] = 0
    figure = plots.operator_maps(operators, "trained")
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 6
    first = panels[0].images[0]
    np.testing.assert_allclose(first.get_array(), operators[0, 0] / np.abs(operators[0, 0]).max(), rtol=1e-12)
    assert first.get_clim() == (-1, 1)
    assert not np.asarray(panels[5].images[0].get_array()).any()
    assert "layer 0, head 0" in panels[0].get_title()
    save(figure, tmp_path)


def test_no_global_figure_state():
    before = "matplotlib.pyplot" in sys.modules
    plots.operator_maps(np.ones((1, 1, 2, 2)))
    assert ("matplotlib.pyplot" in sys.modules) == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.training_curves({}), "1 to 7 runs"),
        (lambda: plots.spectra({}), "one depth"),
        (lambda: plots.spectra({"A": {"x": np.ones((1, 3)), "y": np.ones((2, 3))}}), "one depth"),
        (lambda: plots.operator_maps(np.ones((2, 2))), "pick one input"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_values_by_layer_mark_the_median_and_show_zeros_at_the_edge():
    values = np.array([[1.0, 2.0, 30.0], [0.0, 1e-6, 1e-6]])
    figure = plots.by_layer({"m(A)": {"audited": values, "init": values}, "flat": {"audited": np.ones((2, 1))}})
    wide, flat = figure.axes[:2]
    assert wide.get_yscale() == "log" and flat.get_yscale() == "linear"
    medians = wide.lines[1].get_ydata()
    np.testing.assert_allclose(medians, [2.0, 1e-6])
    assert 0 < min(wide.lines[0].get_ydata()) < 1e-6
    with pytest.raises(ValueError, match="no quantity"):
        plots.by_layer({})


def test_margins_and_gaps_draw_every_prompt():
    figure = plots.margins(np.full((2, 5), 1e-4), np.full((2, 5), 0.3))
    assert len(figure.axes[0].lines) == 4
    np.testing.assert_allclose(figure.axes[0].lines[1].get_ydata(), 0.15)
    figure = plots.gaps(np.array([[1e-3, -1e-3], [3e-3, 1e-3]]))
    np.testing.assert_allclose(figure.axes[0].lines[2].get_ydata(), [2e-3, 0])
