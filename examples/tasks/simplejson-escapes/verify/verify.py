"""Four hexadecimal digits and nothing else, in both halves of a pair."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])
from grading import Grader

grader = Grader.from_argv()
LOAD = r"""
import simplejson
from simplejson.decoder import py_scanstring
def load(inner):
    try:
        return simplejson.loads('"' + inner + '"')
    except simplejson.JSONDecodeError:
        return "refused"
B = chr(92) + "u"
"""

grader.check(
    "blanks, signs and underscores",
    LOAD
    + r"""
bad = [" 123", "+123", "-123", "1_23", "12 4", "123 ", chr(9) + "123", "0x12", "0X1f", "12_3"]
result = [load(B + b) for b in bad]
""",
    expect=["refused"] * 10,
)
grader.check(
    "digits of other scripts",
    LOAD + r"result = [load(B + 4 * chr(0x0661)), load(B + 4 * chr(0xff11))]",
    expect=["refused"] * 2,
)
grader.check(
    "the second half of a pair",
    LOAD
    + r"""
bad = ["dc_1", " c01", "+c01", "0xdc", "zzzz"]
result = [load(B + "d834" + B + b) for b in bad]
""",
    expect=["refused"] * 5,
)
grader.check(
    "too short",
    LOAD + r"result = [load(B), load(B + '1'), load(B + '123'), load(B + '12' + B + '34')]",
    expect=["refused"] * 4,
)
grader.check(
    "valid escapes load as before",
    LOAD
    + r"""
good = ["0041", "00e9", "00E9", "aBcD", "d834" + B + "dd1e", "D834" + B + "DD1E", "0000"]
result = [[ord(c) for c in load(B + g)] for g in good]
""",
    expect=[[0x41], [0xE9], [0xE9], [0xABCD], [0x1D11E], [0x1D11E], [0]],
)
grader.check(
    "lone surrogates load as before",
    LOAD
    + r"""
good = ["d834", "dc01", "d834" + B + "0041", "d834x", "d834" + B + "d834"]
result = [[ord(c) for c in load(B + g)] for g in good]
""",
    expect=[[0xD834], [0xDC01], [0xD834, 0x41], [0xD834, 0x78], [0xD834, 0xD834]],
)
grader.check(
    "documents",
    'import simplejson; result = simplejson.loads("""{"a": [1, 2.5, null, true, "x"]}""")',
    expect={"a": [1, 2.5, None, True, "x"]},
)

grader.finish()
