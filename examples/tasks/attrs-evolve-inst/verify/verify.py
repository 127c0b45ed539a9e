"""`inst` is free for a field when the instance is given by position."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])
from grading import Grader

grader = Grader.from_argv()
EVOLVE = r"""
import attr, attrs
@attr.s
class Exam:
    inst = attr.ib()
    grade = attr.ib(default=3)
@attrs.define
class Point:
    x: int
    _y: int = 2
    z: int = attrs.field(init=False, default=9)
"""

grader.check(
    "a field called inst",
    EVOLVE
    + r"""
old = Exam("a")
new = attr.evolve(old, inst="b")
result = [[new.inst, new.grade], [old.inst, old.grade], attr.astuple(attrs.evolve(old, inst="c", grade=1))]
""",
    expect=[["b", 3], ["a", 3], ["c", 1]],
)
grader.check(
    "the instance by name",
    EVOLVE + "p = attr.evolve(inst=Point(1), x=5); result = [p.x, p._y, p.z]",
    expect=[5, 2, 9],
)
grader.check(
    "ordinary use",
    EVOLVE
    + r"""
p = Point(1, y=7)
result = [attr.evolve(p) == p, attr.evolve(p) is p, attr.evolve(p, y=8)._y, attr.evolve(Exam(1), grade=0).grade]
""",
    expect=[True, False, 8, 0],
)
grader.check("no instance", EVOLVE + "attr.evolve(x=1)", raises="builtins.TypeError")
grader.check("nothing at all", EVOLVE + "attr.evolve()", raises="builtins.TypeError")
grader.check(
    "two instances", EVOLVE + "attr.evolve(Point(1), Point(2))", raises="builtins.TypeError"
)
grader.check(
    "an unknown field", EVOLVE + "attr.evolve(Point(1), nope=1)", raises="builtins.TypeError"
)
grader.check(
    "not an attrs class", EVOLVE + "attr.evolve(3)", raises="attr.exceptions.NotAnAttrsClassError"
)

grader.finish()
