"""A link's target is relative to the directory the link is in."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])
from grading import Grader

grader = Grader.from_argv()
PATHS = r"""
import os, click
from click.testing import CliRunner
here = os.path.realpath(".")
os.makedirs("sub/deep")
for name in ("top", "sub/target", "sub/deep/far"):
    open(name, "w").close()
os.symlink("target", "sub/link")
os.symlink("link", "sub/again")
os.symlink("../../top", "sub/deep/up")
os.symlink(here + "/top", "sub/absolute")
os.symlink("deep", "sub/dir")
os.symlink("nowhere", "sub/dangling")
def resolve(path, **options):
    found = click.Path(resolve_path=True, **options).convert(path, None, None)
    return os.path.relpath(found, here) if os.path.isabs(found) else "not absolute"
"""

grader.check(
    "links in another directory",
    PATHS
    + "result = [resolve(p) for p in ('sub/link', 'sub/again', 'sub/deep/up', 'sub/dir', 'sub/dir/far')]",
    expect=["sub/target", "sub/target", "top", "sub/deep", "sub/deep/far"],
)
grader.check(
    "links elsewhere, absolute links, no links",
    PATHS
    + r"""
os.symlink("sub/target", "local")
result = [resolve(p) for p in ("local", "sub/absolute", "top", "sub/../top", here + "/sub/link")]
""",
    expect=["sub/target", "top", "top", "top", "sub/target"],
)
grader.check(
    "what does not exist",
    PATHS + "result = [resolve('sub/dangling'), resolve('sub/none')]",
    expect=["sub/nowhere", "sub/none"],
)
grader.check(
    "exists=True looks at the target",
    PATHS
    + "result = [resolve('sub/link', exists=True, dir_okay=False), resolve('sub/dir', exists=True, file_okay=False)]",
    expect=["sub/target", "sub/deep"],
)
grader.check(
    "exists=True refuses a dangling link",
    PATHS + "resolve('sub/dangling', exists=True)",
    raises="click.exceptions.BadParameter",
)
grader.check(
    "in a command",
    PATHS
    + r"""
@click.command()
@click.argument("given", type=click.Path(exists=True, resolve_path=True))
@click.option("--plain", type=click.Path())
def show(given, plain):
    click.echo(os.path.relpath(given, here) + " " + plain)
run = CliRunner().invoke(show, ["sub/link", "--plain", "sub/link"])
result = [run.exit_code, run.output]
""",
    expect=[0, "sub/target sub/link\n"],
)

grader.finish()
