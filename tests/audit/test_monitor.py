"""The monitor: phases of a moving average, once per collapse, and the same again when its lines are replayed."""

import math

import pytest

from plga_jax.audit.monitor import MonitorConfig, PhaseMonitor


def follow(monitor, values):
    return [monitor(step, {"m_A.0": value / 2, "m_A.1": value, "m_A_most.0": 9.0}) for step, value in enumerate(values)]


def config(**changes):
    return MonitorConfig(**{"memory": 0.0, "collapsed_below": 0.01, "uncollapsed_above": 0.05} | changes)


def test_phases_of_the_largest_layer():
    found = follow(PhaseMonitor(config()), [0.5, 0.03, 0.001, 0.03, 0.2])
    assert [s.values["phase"] for s in found] == ["uncollapsed", "transition", "collapsed", "transition", "uncollapsed"]
    assert found[1].values["m_average"] == pytest.approx(0.03)


def test_the_average_remembers_in_logarithms():
    found = follow(PhaseMonitor(config(memory=0.5)), [1.0, 0.01, 0.01])
    assert [s.values["m_average"] for s in found] == pytest.approx([1.0, 0.1, math.sqrt(1e-3)])
    assert follow(PhaseMonitor(config()), [0.0])[0].values["m_average"] == pytest.approx(1e-30)


@pytest.mark.parametrize(
    ("action", "done"),
    [
        ("none", (False, False, 1.0)),
        ("abort", (True, False, 1.0)),
        ("save", (False, True, 1.0)),
        ("cut", (False, False, 0.3)),
    ],
)
def test_acts_once_per_collapse(action, done):
    found = follow(PhaseMonitor(config(on_collapse=action)), [0.5, 0.001, 0.03, 0.001, 0.2, 0.001])
    acted = [i for i, s in enumerate(found) if s.note]
    # Not at step 3: it had not left for good.
    assert acted == [1, 5]
    for i in acted:
        assert (found[i].stop, found[i].mark, found[i].rate_factor) == done
        assert f"collapsed at step {i}" in found[i].note
    assert all(not s.stop and not s.mark and s.rate_factor == 1 for i, s in enumerate(found) if i not in acted)


def test_a_run_that_starts_collapsed_sets_nothing_off():
    assert not any(s.note for s in follow(PhaseMonitor(config(on_collapse="abort")), [0.001, 0.001]))


def test_replayed_lines_leave_it_as_it_was():
    values, whole = [0.5, 0.2, 0.03, 0.004, 0.5, 0.004], PhaseMonitor(config(memory=0.3, on_collapse="save"))
    expected = follow(whole, values)
    resumed = PhaseMonitor(config(memory=0.3, on_collapse="save"))
    follow(resumed, values[:4])
    rest = [resumed(step, {"m_A.0": values[step]}) for step in (4, 5)]
    assert rest == expected[4:]


def test_steps_without_a_probe_say_nothing():
    monitor = PhaseMonitor(config())
    assert monitor(1, {"loss": 2.0}) is None
    assert monitor(2, {"m_A.0": None}) is None
    assert monitor(3, {"m_A.0": math.nan}) is None
    assert monitor.average is None


@pytest.mark.parametrize(
    "changes",
    [{"memory": 1.0}, {"collapsed_below": 0.1}, {"on_collapse": "panic"}, {"cut_factor": 1.0}],
)
def test_bad_settings_are_refused(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}="):
        config(**changes)
