"""Archives with doubled leading slashes must be listed, and ordinary ones as before."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])
from grading import Grader

grader = Grader.from_argv()
MAKE = r"""
import io, zipfile, zipp
def archive(*names):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as out:
        for name in names:
            info = zipfile.ZipInfo("x")
            info.filename = name
            out.writestr(info, b"" if name.endswith("/") else name.encode())
    return zipfile.ZipFile(data)
def tree(path):
    for child in path.iterdir():
        yield child.at
        if child.is_dir():
            yield from tree(child)
"""

grader.check(
    "two leading slashes",
    MAKE
    + r"""
path = zipp.Path(archive("//etc/motd", "plain.txt"))
result = "plain.txt" in [child.name for child in path.iterdir()]
""",
    expect=True,
)
grader.check(
    "three slashes, doubled inside",
    MAKE
    + r"""
listed = zipp.CompleteDirs.make(archive("///a/b", "c//d", "e/f", "g/")).namelist()
result = [name in listed for name in ("e/", "e/f", "g/")]
""",
    expect=[True, True, True],
)
grader.check(
    "directories that are only implied",
    MAKE
    + r"""
names = zipp.CompleteDirs.make(archive("a/b/c.txt", "a/d/e/f.txt", "g.txt", "h/")).namelist()
result = sorted(names)
""",
    expect=sorted(["a/b/c.txt", "a/d/e/f.txt", "g.txt", "h/", "a/", "a/b/", "a/d/", "a/d/e/"]),
)
grader.check(
    "walking an ordinary archive",
    MAKE + r"result = sorted(tree(zipp.Path(archive('a/b/c.txt', 'a/d.txt', 'e/', 'f'))))",
    expect=sorted(["a/", "a/b/", "a/b/c.txt", "a/d.txt", "e/", "f"]),
)
grader.check(
    "reading members",
    MAKE
    + r"""
path = zipp.Path(archive("a/b.txt", "c"))
result = [path.joinpath("a", "b.txt").read_text(encoding="utf-8"), (path / "c").exists(), (path / "d").exists()]
""",
    expect=["a/b.txt", True, False],
)

grader.finish()
