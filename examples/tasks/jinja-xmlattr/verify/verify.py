"""Keys that are no attribute name are refused; the filter is otherwise as it was."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])
from grading import Grader

grader = Grader.from_argv()
RENDER = r"""
import jinja2
def render(d, source="<a{{ d|xmlattr }}>", **options):
    return jinja2.Environment(**options).from_string(source).render(d=d, n=None)
def refused(key):
    try:
        return render({"ok": 1, key: "y"}, autoescape=True)
    except ValueError:
        return "refused"
"""

grader.check(
    "white space in a key",
    RENDER
    + r"""
keys = ["title x onmouseover=alert(1) ", "a b", " a", "a ", "a\tb", "a\nb", "a\rb", "a\x0cb"]
result = [refused(key) for key in keys]
""",
    expect=["refused"] * 8,
)
grader.check(
    "characters that end a name",
    RENDER + r"result = [refused(key) for key in ('a/b', 'a>b', 'a=b', '/', '>', '=x')]",
    expect=["refused"] * 6,
)
grader.check(
    "refused without autoescape too",
    RENDER + r"render({'a b': 1})",
    raises="builtins.ValueError",
)
grader.check(
    "other keys render as before",
    RENDER
    + r"""
keys = ["class", "data-x", "@click", ":href", "x.y", "a&b", "a<b", 'a"b', "\u00e9", "v-on:click.prevent"]
result = [render({key: "v"}, autoescape=True) for key in keys]
""",
    expect=[
        f'<a {key}="v">'
        for key in (
            "class",
            "data-x",
            "@click",
            ":href",
            "x.y",
            "a&amp;b",
            "a&lt;b",
            "a&#34;b",
            "\u00e9",
            "v-on:click.prevent",
        )
    ],
)
grader.check(
    "values, none, undefined, spacing",
    RENDER
    + r"""
result = [
    render({"a": "<>&", "b": None, "c": 3}, autoescape=True),
    render({}, autoescape=True),
    render({"a": 1}, "<a{{ d|xmlattr(false) }}>"),
    render({"a": 1, "b": 2}, "{{ {'x': missing, 'y': d.a, 'z': n}|xmlattr }}", autoescape=True),
]
""",
    expect=['<a a="&lt;&gt;&amp;" c="3">', "<a>", '<aa="1">', ' y="1"'],
)

grader.finish()
