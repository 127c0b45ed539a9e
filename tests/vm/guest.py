"""A QEMU guest that runs pytest once and powers off; what it reports comes out of a virtio port.

From a shell: `./dev guest tests/kernel/test_cgroups.py -k freeze`, or any other arguments of pytest.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vm import image, initrd
from tests.vm.kernel import CACHE, REPOSITORY, Kernel, find

QEMU = "qemu-system-x86_64"
MEMORY_MB = 1536
SCRATCH_BYTES, SWAP_BYTES = 4 << 30, 512 << 20
"""Sparse files: they hold what is written to them and are gone with the guest."""
LIMIT_S = 600.0
"""A guest that takes longer is killed. All that is run takes two minutes of processor time without KVM."""
AWAKE_S = 15.0
"""Under KVM the first line of `init` comes within a second. Where it does not come, KVM does not work."""
TCG = ("-accel", "tcg,thread=multi,tb-size=256", "-cpu", "Nehalem")
"""Emulated processors are slower the more they can: what libraries do with wide vectors most of all."""
KVM = ("-accel", "kvm", "-cpu", "host")
ENVIRONMENT = {
    "PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "DSEC_AETHER": str(image.BUILT / "aether"),
    "DSEC_PROBE": str(image.BUILT / "probe"),
    "DSEC_GUEST": "1",
    "PATH": "/usr/bin:/usr/sbin",
    "HOME": "/root",
    "TMPDIR": "/scratch",
}
PYTEST = ("-q", "--tb=short", "--no-header", "-p", "anyio", "-p", "tests.vm.reporting")
WITHOUT = ("-p", "no:cacheprovider", "-o", "faulthandler_timeout=100", "--color=no")


@dataclass
class Outcome:
    """What became of a test, its set-up and tear-down included."""

    outcome: str = "passed"
    text: str = ""


@dataclass
class Run:
    """A guest that has ended."""

    tests: dict[str, Outcome] = field(default_factory=dict)
    """By node id."""
    errors: list[str] = field(default_factory=list)
    """Files that could not be collected."""
    ended: str = "the guest did not end by itself"
    """"" if pytest came to its end."""
    console: str = ""
    seconds: float = 0.0

    def take(self, line: dict[str, Any]) -> None:
        """Add one report of `tests.vm.reporting`."""
        if "end" in line:
            self.ended = ""
        elif line["when"] == "collect":
            self.errors.append(line["text"])
        else:
            test = self.tests.setdefault(line["id"], Outcome())
            if line["outcome"] != "passed":
                test.outcome = line["outcome"]
                test.text += line["text"]


def run(arguments: Sequence[str], limit_s: float = LIMIT_S) -> Run:
    """Run pytest with these arguments in a guest.

    Args:
        arguments: paths relative to the repository, options.
        limit_s: how long the guest may live.

    Raises:
        FileNotFoundError: QEMU or the kernel is not installed; `./dev test` fetches them.
    """
    kernel = find()
    if kernel is None or shutil.which(QEMU) is None:
        raise FileNotFoundError("no QEMU, or no kernel for guests: ./dev test fetches both")
    with tempfile.TemporaryDirectory(prefix="dsec-guest-") as name:
        guest = _Guest(Path(name), kernel)
        guest.prepare(arguments)
        return guest.live(limit_s)


class _Guest:
    """The files of one guest, and its process."""

    def __init__(self, place: Path, kernel: Kernel) -> None:
        self.place = place
        self.kernel = kernel
        self.console, self.reports = place / "console", place / "reports"

    def prepare(self, arguments: Sequence[str]) -> None:
        argv = [sys.executable, "-m", "pytest", *PYTEST, *WITHOUT, *arguments]
        environment = [f"{key}={value}" for key, value in ENVIRONMENT.items()]
        command = shlex.join(["env", "-i", *environment, *argv])
        image.build(self.place / "root", f"cd {shlex.quote(str(REPOSITORY))}\n{command}\n")
        initrd.build(self.kernel, self.place / "initrd")
        for name, size in (("scratch", SCRATCH_BYTES), ("swap", SWAP_BYTES)):
            with (self.place / name).open("wb") as file:
                file.truncate(size)
        argv = ["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", str(self.place / "scratch")]
        subprocess.run(argv, check=True)

    def live(self, limit_s: float) -> Run:
        begun = time.monotonic()
        if _kvm_may_work():
            works = self._live(KVM, limit_s, awake_s=AWAKE_S)
            _remember_kvm(works=works)
            if works:
                return self._outcome(begun)
        self._live(TCG, limit_s, awake_s=limit_s)
        return self._outcome(begun)

    def _live(self, accelerator: tuple[str, ...], limit_s: float, awake_s: float) -> bool:
        """Boot, and wait for the end or the limit. False if it did not even wake up in time."""
        begun = time.monotonic()
        with self._process(accelerator) as process:
            while process.poll() is None:
                lived = time.monotonic() - begun
                if lived > limit_s or (lived > awake_s and not self._awake()):
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        return self._awake()

    def _awake(self) -> bool:
        return "guest: awake" in self._console()

    def _console(self) -> str:
        return self.console.read_text(errors="replace") if self.console.exists() else ""

    @contextlib.contextmanager
    def _process(self, accelerator: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
        """QEMU, which ends with this block, and with this process however that ends."""
        argv = ["setpriv", "--pdeathsig", "KILL", *self._argv(accelerator)]
        with (self.place / "qemu").open("wb") as said:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _argv(self, accelerator: tuple[str, ...]) -> list[str]:
        return [
            *(QEMU, *accelerator, "-M", "q35", "-m", str(MEMORY_MB), "-smp", "2"),
            *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
            *("-kernel", str(self.kernel.image), "-initrd", str(self.place / "initrd")),
            "-append",
            "console=ttyS0 quiet panic=-1 cgroup_no_v1=all mitigations=off",
            *("-chardev", f"file,id=console,path={self.console}", "-serial", "chardev:console"),
            *("-chardev", f"file,id=reports,path={self.reports}"),
            *("-device", "virtio-serial-pci"),
            *("-device", "virtserialport,chardev=reports,name=reports"),
            *self._disk("root", "readonly=on"),
            *self._disk("scratch", "cache=unsafe"),
            *self._disk("swap", "cache=unsafe"),
        ]

    def _disk(self, name: str, options: str) -> tuple[str, ...]:
        drive = f"if=none,id={name},format=raw,file={self.place / name},{options}"
        return ("-drive", drive, "-device", f"virtio-blk-pci,drive={name}")

    def _outcome(self, begun: float) -> Run:
        result = Run(seconds=time.monotonic() - begun)
        said = (self.place / "qemu").read_text(errors="replace")
        result.console = self._console() + said
        lines = self.reports.read_bytes().splitlines() if self.reports.exists() else []
        for line in lines:
            with contextlib.suppress(
                json.JSONDecodeError
            ):  # the last one of a guest that was killed
                result.take(json.loads(line))
        return result


def _verdict() -> Path:
    """Where it is written down whether KVM works; asked again after a boot of this host."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return CACHE / f"kvm-{boot}"


def _kvm_may_work() -> bool:
    usable = os.access("/dev/kvm", os.R_OK | os.W_OK)
    return usable and not (_verdict().exists() and _verdict().read_text() == "no")


def _remember_kvm(*, works: bool) -> None:
    for old in CACHE.glob("kvm-*"):
        old.unlink()
    _verdict().write_text("yes" if works else "no")


def main() -> int:
    """Run pytest in a guest and show what it showed."""
    result = run(sys.argv[1:] or ["tests/vm/inside"])
    print(result.console[result.console.find("guest: awake") :])  # noqa: T201
    bad = [
        f"{name}: {test.text}" for name, test in result.tests.items() if test.outcome == "failed"
    ]
    print("\n".join([*bad, *result.errors, result.ended]))  # noqa: T201
    return 1 if bad or result.errors or result.ended else 0


if __name__ == "__main__":
    sys.exit(main())
