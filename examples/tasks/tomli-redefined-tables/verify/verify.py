"""Dotted keys may not reach into tables of other headers; all else parses as before."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])
from grading import Grader

grader = Grader.from_argv()
LOAD = r"""
import tomli
def load(text):
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError:
        return "refused"
"""

BAD = [
    "[a.b]\nx = 1\n[a]\nb.y = 2",
    "[[a.b]]\n[a]\nb.y = 2",
    "[a.b.c]\nz = 9\n[a]\nb.c.t = 1",
    "[a.b.c]\n[a.b]\nc.d = 1",
    "[[t]]\n[t.u]\nv = 1\n[[t.w]]\n[t]\nw.x = 1",
    "[x.y]\n[z]\n[x]\ny.q.r = 1",
]
GOOD = {
    "[a]\nb.x = 1\nb.y = 2": {"a": {"b": {"x": 1, "y": 2}}},
    "b.x = 1\nb.y = 2\nb.z.w = 3\nb.z.v = 4": {"b": {"x": 1, "y": 2, "z": {"w": 3, "v": 4}}},
    "[a]\nb.c.d = 1\nb.e = 2\nb.c.f = 3": {"a": {"b": {"c": {"d": 1, "f": 3}, "e": 2}}},
    "[a.b]\nx = 1\n[a]\ny = 2": {"a": {"b": {"x": 1}, "y": 2}},
    "[[a]]\nb.c = 1\n[[a]]\nb.c = 2\nb.d = 3": {"a": [{"b": {"c": 1}}, {"b": {"c": 2, "d": 3}}]},
    "[f]\ng.h = 1\n[f.g.i]\nj = 2": {"f": {"g": {"h": 1, "i": {"j": 2}}}},
    "[a]\n[a.b.c]\nx = 1\n[d]\nb.c = 2": {"a": {"b": {"c": {"x": 1}}}, "d": {"b": {"c": 2}}},
    "p = {q.r = 1, q.s = 2}": {"p": {"q": {"r": 1, "s": 2}}},
}
STILL_BAD = [
    "[a]\n[a]",
    "a = 1\na = 2",
    "[a]\nb.c = 1\n[a.b]",
    "a.b = 1\na.b.c = 2",
    "a = {}\na.b = 1",
    "[[a]]\n[a]",
    "a = [1]\n[[a]]",
]

grader.check(
    "tables of other headers",
    LOAD + f"result = [load(t) for t in {BAD!r}]",
    expect=["refused"] * len(BAD),
)
grader.check(
    "documents that are right",
    LOAD + f"result = [load(t) for t in {list(GOOD)!r}]",
    expect=list(GOOD.values()),
)
grader.check(
    "what was refused before",
    LOAD + f"result = [load(t) for t in {STILL_BAD!r}]",
    expect=["refused"] * len(STILL_BAD),
)
grader.check(
    "a document of everything",
    LOAD
    + r"""
result = load('''
title = "x" # comment
[owner]
name = 'y'
dates.born = "1979"
dates.seen = "2020"
[servers]
[servers.alpha]
ports = [1, 2,
  3]
[[products]]
name = "n"
size.w = 1
size.h = 2
[[products]]
[products.part]
id = 0x10
''')
""",
    expect={
        "title": "x",
        "owner": {"name": "y", "dates": {"born": "1979", "seen": "2020"}},
        "servers": {"alpha": {"ports": [1, 2, 3]}},
        "products": [{"name": "n", "size": {"w": 1, "h": 2}}, {"part": {"id": 16}}],
    },
)

grader.finish()
