"""Slices agree with those of a list, whatever was removed before."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])
from grading import Grader

grader = Grader.from_argv()
SET = r"""
import random
from boltons.setutils import IndexedSet
BOUNDS = [None, -30, -7, -3, -1, 0, 1, 2, 4, 6, 9, 30]
def made(size, removed):
    s = IndexedSet(range(size))
    for item in removed:
        s.remove(item)
    return s
def wrong(s, steps=(None, 1, 2, 3)):
    values = list(s)
    return [
        str(cut)
        for cut in (slice(a, b, c) for a in BOUNDS for b in BOUNDS for c in steps)
        if list(s[cut]) != values[cut] or list(s.iter_slice(cut.start, cut.stop, cut.step)) != values[cut]
    ][:5]
"""

grader.check(
    "after a few removals",
    SET
    + r"""
result = [
    wrong(made(12, gone)) for gone in ([2, 3, 7], [0], [11], [5], [0, 1, 2], [10, 11], [1, 3, 5], [])
]
""",
    expect=[[]] * 8,
)
grader.check(
    "after many random removals and additions",
    SET
    + r"""
dice, bad = random.Random(7), []
for _ in range(25):
    s = made(dice.randrange(5, 60), [])
    for item in dice.sample(range(len(s)), dice.randrange(len(s))):
        s.remove(item)
    s.update(range(100, 100 + dice.randrange(5)))
    bad += wrong(s)
result = bad
""",
    expect=[],
)
grader.check(
    "a slice is an IndexedSet in order",
    SET
    + r"""
s = made(12, [2, 3, 7])
result = [type(s[1:3]).__name__, list(s[1:3]), list(s[::-1]), list(s[:]), list(s)]
""",
    expect=[
        "IndexedSet",
        [1, 4],
        [11, 10, 9, 8, 6, 5, 4, 1, 0],
        [0, 1, 4, 5, 6, 8, 9, 10, 11],
        [0, 1, 4, 5, 6, 8, 9, 10, 11],
    ],
)
grader.check(
    "single items, index, pop and the set operations",
    SET
    + r"""
s = made(12, [2, 3, 7])
t = made(12, [2, 3, 7])
result = [
    [s[i] for i in (0, 2, 4, -1, -9)],
    [s.index(x) for x in (0, 4, 8, 11)],
    [t.pop(), t.pop(0), t.pop(2)], list(t),
    list(s & {4, 5, 2}), list(s - {0, 1, 4}), 7 in s, len(s),
]
""",
    expect=[
        [0, 4, 6, 11, 0],
        [0, 2, 5, 8],
        [11, 0, 5],
        [1, 4, 6, 8, 9, 10],
        [4, 5],
        [5, 6, 8, 9, 10, 11],
        False,
        9,
    ],
)

grader.finish()
