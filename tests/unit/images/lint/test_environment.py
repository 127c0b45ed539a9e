from __future__ import annotations

from dsec.images.lint.environment import Environment
from tests.unit.images.lint.build import Sketch, environment


def find(env: Environment, path: str) -> bytes | None:
    entry = env.find(path.encode())
    return None if entry is None else entry.path


def test_links_are_followed_within_the_environment() -> None:
    s = Sketch()
    s.file("/usr/bin/x")
    s.link("/bin", b"usr/bin")
    s.link("/a/up", b"../../../bin")
    s.link("/a/abs", b"/a/up/x")
    s.link("/loop", b"loop")
    env = environment(s)
    assert find(env, "/a/abs") == b"/usr/bin/x"
    assert find(env, "//bin/./../bin/x") == b"/usr/bin/x"
    assert find(env, "/") == b"/"
    assert find(env, "/loop") is None
    assert find(env, "/bin/y") is None
    assert env.file(b"/bin") is None


def test_what_is_below_is_that_of_all_parts() -> None:
    low, high = Sketch(), Sketch()
    low.file("/d/a/x")
    low.file("/d/b")
    high.file("/d/a/y")
    high.whiteout("/d/b")
    env = environment(low, high)
    directory = env.find(b"/d")
    assert directory is not None
    assert sorted(e.path for e in env.below(directory)) == [b"/d/a", b"/d/a/x", b"/d/a/y"]


def test_content_is_that_of_the_part_it_is_of() -> None:
    low, high = Sketch(), Sketch()
    low.file("/f", b"low")
    low.file("/g", b"0123456789")
    high.file("/f", b"high")
    env = environment(low, high)
    assert env.text(b"/f") == "high"
    assert env.content(env.entries[b"/g"], 3, 5) == b"567"
    assert env.content(env.entries[b"/g"], 30, 8) == b"89"
    assert env.content(env.entries[b"/g"], 30, 20) == b""
    assert env.text(b"/nonesuch") is None


def test_packaged_paths_through_links_of_the_root() -> None:
    s = Sketch()
    s.link("/bin", b"usr/bin")
    s.file("/usr/bin/su")
    s.file("/var/lib/dpkg/info/login.list", b"/bin/su\n/home/x\n")
    assert environment(s).packaged == {b"/usr/bin/su"}
