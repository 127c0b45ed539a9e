# ruff: noqa: TID251, S603  -- runs inside a verify sandbox, where only the standard library is
"""Grading, uploaded beside every `verify.py`. Runs in the sandbox: Python 3.9, standard library only.

The code under test never runs in the grader's process. Each check is a probe: a few lines run by
a fresh interpreter, as a user of their own, in an empty directory, with the work tree on the
import path. The probe's code and inputs go in, one JSON value comes out; what it is compared with
stays here, in a process and files the probe cannot read. So a work tree that prints a verdict, exits early, hooks
the interpreter or looks for the answers only fails the check it disturbs.

What is printed, one JSON object a line: `{"check", "passed", "detail"}` for each check, then
`{"verdict": {"passed", "failed"}}`. Anything else - another exit status, no last line - means that
the grader itself broke, which is never held against the agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_USER = 40000 + os.getpid() % 20000
"""A user nobody else is, nor another grader, as all its processes are killed after each probe."""
_RESULT_LIMIT_BYTES = 1 << 20
_MAX_HUNG = 2
_WALL_PER_CPU = 3

# The child: keep the result's descriptor to itself, point 0-2 at /dev/null, bound what it may
# write, then run the probe. Every class of the exception's MRO is named, so that a check may ask
# for a base class.
_CHILD = """
import json, os, resource, sys
probe = json.loads(sys.stdin.buffer.read())
out = os.fdopen(os.dup(1), "w")
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
resource.setrlimit(resource.RLIMIT_FSIZE, (probe["limit"],) * 2)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_NPROC, (32, 32))
resource.setrlimit(resource.RLIMIT_CPU, (probe["cpu_s"], probe["cpu_s"] + 1))
sys.path[:0] = probe["paths"]
space = {"__name__": "__probe__"}
try:
    exec(compile(probe["code"], "<probe>", "exec"), space)
    said = {"result": space.get("result")}
    json.dumps(said)
except BaseException as error:
    names = [c.__module__ + "." + c.__qualname__ for c in type(error).__mro__]
    said = {"raised": names, "message": str(error)[:300]}
out.write(json.dumps(said))
out.flush()
os._exit(0)
"""


class Grader:
    """Runs checks against one work tree and prints what came of them."""

    def __init__(self, tree: str, paths: list[str], probe_cpu_s: int = 10) -> None:
        """Take the work tree, its import paths, and the CPU seconds one probe may use.

        CPU time, because a busy host must not turn a right answer into a wrong one; a probe that
        sleeps instead is ended after three times as long.
        """
        self.tree = tree
        self._paths = paths
        self._cpu_s = probe_cpu_s
        self._hung = 0
        self._passed = 0
        self._failed = 0

    @classmethod
    def from_argv(cls, probe_cpu_s: int = 10) -> Grader:
        """Take the work tree and the import paths from the command line."""
        return cls(sys.argv[1], sys.argv[2:] or [sys.argv[1]], probe_cpu_s)

    def check(self, name: str, code: str, *, expect: Any = None, raises: str = "") -> None:
        """Run `code`; it must leave `result` equal to `expect`, or raise `raises`.

        Values are compared as JSON, so a tuple equals a list. `raises` is a dotted class name.
        """
        if self._hung >= _MAX_HUNG:
            self._report(name, passed=False, detail="not run: earlier checks hung")
            return
        said = self._probe(code)
        if "broken" in said:
            passed, detail = False, said["broken"]
        elif "raised" in said:
            passed = raises in said["raised"]
            detail = f"raised {said['raised'][0]}: {said['message']}"
        else:
            passed = not raises and said["result"] == json.loads(json.dumps(expect))
            wanted = f"an exception {raises}" if raises else repr(expect)
            detail = f"wanted {wanted}, got {said['result']!r}"
        self._report(name, passed=passed, detail="" if passed else detail)

    def finish(self) -> None:
        """Print the verdict and end the process."""
        print(json.dumps({"verdict": {"passed": self._passed, "failed": self._failed}}))  # noqa: T201
        sys.exit(0)

    def _report(self, name: str, *, passed: bool, detail: str) -> None:
        self._passed += passed
        self._failed += not passed
        print(json.dumps({"check": name, "passed": passed, "detail": detail[:300]}), flush=True)  # noqa: T201

    def _probe(self, code: str) -> dict[str, Any]:
        spec = {
            "code": code,
            "paths": self._paths,
            "limit": _RESULT_LIMIT_BYTES,
            "cpu_s": self._cpu_s,
        }
        scratch = tempfile.mkdtemp(prefix="probe")
        try:
            # A file, not a pipe: a grandchild that keeps it open can hold nothing up.
            with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out:
                given.write(json.dumps(spec).encode())
                given.seek(0)
                ended = self._run(given, out, scratch)
                out.seek(0)
                return _understand(out.read(_RESULT_LIMIT_BYTES), ended)
        finally:
            _remove(scratch)

    def _run(self, given: Any, out: Any, scratch: str) -> str:
        """Run the child to its end or the time limit, then kill whatever it left behind."""
        drop: dict[str, Any] = {}
        if os.geteuid() == 0:
            os.chown(scratch, _USER, _USER)
            drop = {"user": _USER, "group": _USER, "extra_groups": []}
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", "-W", "ignore", "-c", _CHILD],
            stdin=given,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=scratch,
            env={"HOME": scratch, "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC"},
            start_new_session=True,
            **drop,
        )
        try:
            status: int | None = child.wait(self._cpu_s * _WALL_PER_CPU)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            if drop:
                _kill_all_of(_USER)
            child.wait()
        if status is None or status == -signal.SIGXCPU:
            self._hung += 1
            return f"it used up {self._cpu_s} s of CPU time, or slept for longer"
        return f"exit status {status}"


def _remove(scratch: str) -> None:
    try:
        shutil.rmtree(scratch, ignore_errors=True)
    except RecursionError:  # a probe may leave a tree deeper than that can go
        subprocess.run(["/bin/rm", "-rf", "--", scratch], check=False)


def _kill_all_of(user: int) -> None:
    """Kill what left its process group too; again, until none is left or a few rounds are over."""
    for _ in range(5):
        found = [pid for pid in map(_pid, Path("/proc").iterdir()) if pid and _is_of(pid, user)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _pid(path: Path) -> int:
    return int(path.name) if path.name.isdigit() else 0


def _is_of(pid: int, user: int) -> bool:
    """Whether it lives and is the user's. Its own word: the file's owner can be hidden."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
    except OSError:
        return False
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return fields["Uid"].split()[0] == str(user) and fields["State"].split()[0] not in "ZX"


def _understand(said: bytes, ended: str) -> dict[str, Any]:
    """Read what the probe said; it may be anything, and must never break the grader."""
    broken = {"broken": f"the probe gave no result ({ended})"}
    try:
        value = json.loads(said)
    except (ValueError, RecursionError):
        return broken
    if not isinstance(value, dict):
        return broken
    if "result" in value:
        return {"result": value["result"]}
    raised, message = value.get("raised"), value.get("message")
    if not isinstance(raised, list) or not raised or not isinstance(message, str):
        return broken
    return {"raised": [str(name) for name in raised], "message": message}
