"""Slices agree with those of `range` and of lists, and are numeric ranges."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])
from grading import Grader

grader = Grader.from_argv()
RANGE = r"""
from datetime import date, timedelta
from fractions import Fraction
from more_itertools import numeric_range
BOUNDS = [None, -99, -4, -1, 0, 1, 3, 99]
def slices(steps):
    return [slice(a, b, c) for a in BOUNDS for b in BOUNDS for c in steps]
def wrong(made, steps):
    values = list(made)
    return [str(s) for s in slices(steps) if list(made[s]) != values[s]][:5]
"""

grader.check(
    "backwards over whole numbers, counting up and down",
    RANGE
    + r"""
ranges = [(10,), (0, 10, 3), (10, 0, -3), (5, 6), (5, 5), (-3, 4, 2)]
result = [wrong(numeric_range(*r), [-1, -2, -5, -99]) for r in ranges]
""",
    expect=[[]] * 6,
)
grader.check(
    "backwards over fractions, floats and dates",
    RANGE
    + r"""
day = timedelta(days=1)
ranges = [
    numeric_range(Fraction(1, 3), Fraction(3), Fraction(1, 3)),
    numeric_range(0.0, 4.0, 0.5),
    numeric_range(date(2024, 2, 27), date(2024, 3, 3), day),
    numeric_range(date(2024, 3, 3), date(2024, 2, 27), -day),
]
result = [wrong(r, [-1, -2]) for r in ranges]
""",
    expect=[[]] * 4,
)
grader.check(
    "forwards, as before",
    RANGE
    + r"""
result = [wrong(numeric_range(*r), [None, 1, 2, 7]) for r in [(10,), (0, 10, 3), (10, 0, -3), (5, 5)]]
""",
    expect=[[]] * 4,
)
grader.check(
    "a slice is a numeric_range",
    RANGE
    + r"""
back = numeric_range(0, 10, 3)[::-1]
result = [
    type(back).__name__,
    back == numeric_range(9, -1, -3),
    len(back),
    6 in back,
    back.index(3),
    list(back[::-1]),
    list(reversed(back)),
    type(numeric_range(10)[2:5]).__name__,
]
""",
    expect=["numeric_range", True, 4, True, 2, [0, 3, 6, 9], [0, 3, 6, 9], "numeric_range"],
)
grader.check(
    "a step of zero is refused",
    RANGE + "numeric_range(10)[::0]",
    raises="builtins.ValueError",
)

grader.finish()
