"""Long series as few points: no peak is lost, gaps stay, all lines of a grid share its axis."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.report.downsample import MAX_POINTS, Grid, rounded
from streamrl.report.model import Number

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6, width=32), st.just(math.nan)), min_size=1, max_size=400)


def known(values: list[Number]) -> list[float]:
    return [value for value in values if value is not None]


@settings(max_examples=150, deadline=None)
@given(VALUES, st.sampled_from([4, 10, 50]))
def test_lowest_and_highest_stay_and_no_line_is_longer_than_the_limit(values, limit):
    grid = Grid(range(len(values)), limit)
    points = grid.extremes(values)
    assert len(points) == len(grid.axis) == len(grid.means(values)) <= max(limit, 2)
    original = known(rounded(values))
    assert bool(original) == bool(known(points))
    if original:
        assert (min(known(points)), max(known(points))) == (min(original), max(original))
    assert grid.axis == sorted(grid.axis)


def test_a_short_series_stays_as_it_is():
    assert Grid([1.0, 2.0, 3.0]).extremes([0.5, math.nan, 7.0]) == [0.5, None, 7]
    assert Grid([]).extremes([]) == [] and Grid([]).axis == []


def test_a_stretch_without_values_stays_a_gap_and_a_peak_keeps_its_place():
    values = [1.0] * 400 + [math.nan] * 200 + [2.0] * 400
    values[123] = 99.0
    grid = Grid([float(i) for i in range(1000)], 100)
    points = grid.extremes(values)
    assert points.count(99) == 1 and abs(grid.axis[points.index(99)] - 123) <= 20
    assert points.count(None) == 20


def test_a_week_of_scrapes_is_600_points():
    assert len(Grid(range(7 * 24 * 720)).axis) <= MAX_POINTS
