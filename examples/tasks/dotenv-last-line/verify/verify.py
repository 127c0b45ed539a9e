"""A new key goes on a line of its own; everything else stays as it was."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])
from grading import Grader

grader = Grader.from_argv()
SET = r"""
import dotenv
def after(before, *args, **kwargs):
    with open(".env", "w") as out:
        out.write(before)
    dotenv.set_key(".env", *args, **kwargs)
    with open(".env") as text:
        return text.read()
"""

grader.check(
    "no newline at the end",
    SET
    + r"""
result = [
    after("a=b", "c", "d"),
    after("a=b\nx=y", "c", "d"),
    after("a=b\n# note", "c", "d"),
    after("export a=b", "c", "d", export=True),
    after("a='multi\nline'", "c", "d", quote_mode="never"),
]
""",
    expect=[
        "a=b\nc='d'\n",
        "a=b\nx=y\nc='d'\n",
        "a=b\n# note\nc='d'\n",
        "export a=b\nexport c='d'\n",
        "a='multi\nline'\nc=d\n",
    ],
)
grader.check(
    "a newline at the end, or nothing at all",
    SET + r"result = [after(b, 'c', 'd') for b in ('a=b\n', '', '\n', '# x\n', 'a=b\n\n')]",
    expect=["a=b\nc='d'\n", "c='d'\n", "\nc='d'\n", "# x\nc='d'\n", "a=b\n\nc='d'\n"],
)
grader.check(
    "replacing a key",
    SET + r"result = [after(b, 'a', 'z') for b in ('a=b', 'a=b\nc=d', 'c=d\na=b', 'a=b\nc=d\n')]",
    expect=["a='z'\n", "a='z'\nc=d", "c=d\na='z'\n", "a='z'\nc=d\n"],
)
grader.check(
    "both values can be read back, twice over",
    SET
    + r"""
after("a=b", "c", "d")
dotenv.set_key(".env", "e", "f")
result = dict(dotenv.dotenv_values(".env"))
""",
    expect={"a": "b", "c": "d", "e": "f"},
)

grader.finish()
