"""Comments with line breaks are stripped quickly, and to the same result as before."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])
from grading import Grader

grader = Grader.from_argv()
STRIP = r"""
import sqlparse
def strip(sql):
    return sqlparse.format(sql, strip_comments=True)
"""

grader.check(
    "many empty lines inside a comment",
    STRIP
    + r"result = [strip('select 1 /* a' + n * '\r\n' + 'b */ from t') for n in (3, 40, 200, 5000)]",
    expect=["select 1  from t"] * 4,
)
grader.check(
    "other line ends, blanks between them, several comments",
    STRIP
    + r"""
result = [
    strip("select 1 /* a" + 3000 * "\n" + "b */ from t"),
    strip("select 1 /* a" + 3000 * "\r" + "b */ from t"),
    strip("select 1 /* a" + 500 * "\r\n " + "b */ from t"),
    strip("select 1 " + 5 * ("/* a" + 60 * "\r\n" + "b */ ") + "from t"),
]
""",
    expect=["select 1  from t"] * 4,
)
grader.check(
    "the same results as before",
    STRIP
    + r"""
result = [strip(sql) for sql in (
    "select a -- c\nfrom b",
    "select a /* x\r\n */from b -- c\r\nwhere d",
    "select a /* x */ \n from b -- c\n\nwhere d",
    "select a --x\n\n--y\n from b",
    "-- only\nselect 1",
    "select (/* sql starts here */ select 2)",
    "select 1; -- one\nselect 2;",
    "/* a */ /* b */ select '-- no comment'",
)]
""",
    expect=[
        "select a\nfrom b",
        "select a  from b\nwhere d",
        "select a\nfrom b\n\nwhere d",
        "select a\nfrom b",
        "select 1",
        "select (select 2)",
        "select 1;\nselect 2;",
        "select '-- no comment'",
    ],
)
grader.check(
    "formatting otherwise",
    "import sqlparse; result = [sqlparse.format('select a,b from t where c=1', reindent=True, keyword_case='upper'), sqlparse.split('select 1; select 2')]",
    expect=["SELECT a,\n       b\nFROM t\nWHERE c=1", ["select 1;", "select 2"]],
)

grader.finish()
