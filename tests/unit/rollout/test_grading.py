"""The grader against work trees that do not want to be graded; in real processes, on this host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.rollout import grading
from dsec.rollout.outcomes import Verdict, judge

GRADING = Path(grading.__file__)
# One that another user may run: a Python below root's home is not.
PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable


def grade(tmp_path: Path, package: str, checks: str, cpu_s: int = 10) -> Verdict:
    tree = tmp_path / "tree"
    tree.mkdir(exist_ok=True)
    (tree / "thing.py").write_text(package)
    verify = tmp_path / "verify"
    verify.mkdir()
    (verify / "grading.py").write_bytes(GRADING.read_bytes())
    (verify / "verify.py").write_text(
        "import sys\nsys.path.insert(0, __file__.rpartition('/')[0])\n"
        f"from grading import Grader\ng = Grader.from_argv({cpu_s})\n{checks}\ng.finish()\n"
    )
    # pytest's directories are closed to other users, and the probes are run by one.
    for path in (tmp_path, tree, *tmp_path.parents[:3]):
        if path != Path("/tmp"):
            path.chmod(0o755)
    (tree / "thing.py").chmod(0o644)
    verify.chmod(0o700)
    ran = subprocess.run(
        [PYTHON, "-I", "-B", str(verify / "verify.py"), str(tree)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return judge(ran.stdout, exit_code=ran.returncode, timed_out=False, truncated=False)


CHECK = "g.check('answer', 'import thing; result = thing.answer()', expect=[4, 2])\n"


def test_right_answer(tmp_path: Path) -> None:
    assert grade(tmp_path, "def answer(): return (4, 2)", CHECK).outcome == "solved"


def test_wrong_answer(tmp_path: Path) -> None:
    found = grade(tmp_path, "def answer(): return [4]", CHECK)
    assert found.outcome == "failed"
    assert "got [4]" in found.checks[0].detail


def test_wanted_exception(tmp_path: Path) -> None:
    package = "class Mine(ValueError): pass\ndef answer(): raise Mine('x')"
    checks = "".join(
        f"g.check('{name}', 'import thing; thing.answer()', raises='{name}')\n"
        for name in ("thing.Mine", "builtins.ValueError", "builtins.KeyError")
    )
    assert [check.passed for check in grade(tmp_path, package, checks).checks] == [
        True,
        True,
        False,
    ]


FORGED = json.dumps({"verdict": {"passed": 1, "failed": 0}})


# Only root can run the probes as somebody else, who may not do this.
KILLS_GRADER = ["import os; os.kill(os.getppid(), 9)\ndef answer(): return 0"] * (os.geteuid() == 0)


@pytest.mark.parametrize(
    "package",
    [
        f"print('{FORGED}'); import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import os\nfor _ in range(3000):\n  os.mkdir('d'); os.chdir('d')",
        "import os; os.kill(os.getpid(), 9)",
        *KILLS_GRADER,
        f"import os\nfor fd in range(64):\n  try: os.write(fd, b'{FORGED}')\n  except OSError: pass\nos._exit(0)",
        "import os\nfor fd in range(64):\n  try: os.write(fd, b'{\"raised\": [3]}')\n  except OSError: pass\nos._exit(0)",
        "import os\nfor fd in range(64):\n  try: os.write(fd, b'[' * 100000)\n  except OSError: pass\nos._exit(0)",
        "def answer(): return object()",
        "def answer(): return '\\ud800'",
        "def answer(): return 'x' * (2 << 20)",
        "import builtins; builtins.compile = builtins.exec = None; raise MemoryError",
        "class E(Exception):\n  def __str__(self): raise E\ndef answer(): raise E",
        "syntax error",
        "",
    ],
)
def test_hostile_tree_fails_and_does_not_break_the_grader(tmp_path: Path, package: str) -> None:
    assert grade(tmp_path, package, CHECK).outcome == "failed"


def test_hanging_tree_is_ended_and_the_rest_not_run(tmp_path: Path) -> None:
    found = grade(tmp_path, "while True: pass", CHECK * 3, cpu_s=1)
    assert found.outcome == "failed"
    assert "1 s of CPU" in found.checks[0].detail
    assert found.checks[2].detail == "not run: earlier checks hung"


def test_leftover_process_holds_nothing_up(tmp_path: Path) -> None:
    package = (
        "import os, time\n"
        "if os.fork() == 0:\n  os.setsid()\n  time.sleep(50)\n  os._exit(0)\n"
        "def answer(): return [4, 2]"
    )
    assert grade(tmp_path, package, CHECK).outcome == "solved"


def test_tree_cannot_read_the_verifier(tmp_path: Path) -> None:
    package = f"def answer(): return open({str(tmp_path / 'verify' / 'verify.py')!r}).read()"
    found = grade(tmp_path, package, CHECK)
    assert found.outcome == "failed"
    if os.geteuid() == 0:
        assert "PermissionError" in found.checks[0].detail


def test_modules_of_the_tree_do_not_shadow_the_graders(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("json", "subprocess", "grading", "sitecustomize", "os"):
        (tree / f"{name}.py").write_text(f"print('{FORGED}')\nraise SystemExit")
    found = grade(tmp_path, "def answer(): return [4, 2]", CHECK)
    assert found.outcome == "solved"
