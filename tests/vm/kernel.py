"""The guest's kernel: Debian's cloud kernel, unpacked below .cache, never installed here.

`python -m tests.vm.kernel` fetches it with apt from the Debian mirror this machine uses already, with
lists and sources of its own: what apt thinks of this machine does not change.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CACHE = REPOSITORY / ".cache/vm"
PLACE = CACHE / "kernel"
SUITE = "trixie-backports"
"""Debian 12 and 13 themselves have 6.1 and 6.12; overlayfs takes layers as descriptors since 6.13."""
PACKAGE = re.compile(r"linux-image-(6\.18\.\d+)\+deb13-cloud-amd64")
"""A series with long support; the newest of it is taken."""
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel."""

    image: Path
    modules: Path

    @property
    def release(self) -> str:
        return self.modules.name


def find() -> Kernel | None:
    """The kernel that was fetched, if any."""
    images = list(PLACE.glob("boot/vmlinuz-*"))
    if not images:
        return None
    release = images[0].name.removeprefix("vmlinuz-")
    found = [p for p in PLACE.glob(f"**/modules/{release}") if p.is_dir()]
    return Kernel(images[0], found[0]) if found else None


def fetch() -> None:
    """Download and unpack it unless it is there.

    Raises:
        LookupError: no mirror of Debian is configured, or it has no such kernel.
        CalledProcessError: apt or dpkg failed; it has said why.
    """
    if find() is not None:
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="fetching-") as name:
        place = Path(name)
        archive = _download(_Apt(place), place)
        subprocess.run(["dpkg-deb", "-x", archive, place / "tree"], check=True)
        shutil.rmtree(PLACE, ignore_errors=True)
        (place / "tree").rename(PLACE)


class _Apt:
    """apt with sources, lists and cache of its own."""

    def __init__(self, place: Path) -> None:
        for part in ("sources", "lists/partial", "cache/archives/partial"):
            (place / part).mkdir(parents=True)
        (place / "sources/guest.sources").write_text(
            f"Types: deb\nURIs: {_mirror()}\nSuites: {SUITE}\nComponents: main\n"
            f"Signed-By: {KEYRING}\n"
        )
        settings = {
            "Dir::Etc::SourceList": "/dev/null",
            "Dir::Etc::SourceParts": place / "sources",
            "Dir::State::Lists": place / "lists",
            "Dir::Cache": place / "cache",
            "APT::Sandbox::User": "root",
        }
        self._options = [f"-o{key}={value}" for key, value in settings.items()]

    def __call__(self, program: str, *argv: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            [program, "-qq", *self._options, *argv],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        return done.stdout


def _mirror() -> str:
    """Where this machine gets Debian from."""
    form = "$(REPO_URI) $(ORIGIN) $(LABEL)"
    argv = ["apt-get", "indextargets", "--format", form]
    listed = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
    for line in listed.splitlines():
        uri, _, origin = line.partition(" ")
        if origin == "Debian Debian":
            return uri
    raise LookupError("apt has no lists of a Debian mirror: apt-get update")


def _download(apt: _Apt, place: Path) -> Path:
    apt("apt-get", "update")
    names = apt("apt-cache", "pkgnames", "linux-image-").splitlines()
    found = [match for name in names if (match := PACKAGE.fullmatch(name))]
    if not found:
        raise LookupError(f"{SUITE} has no package {PACKAGE.pattern}")
    newest = max(found, key=lambda match: [int(part) for part in match[1].split(".")])
    apt("apt-get", "download", newest[0], cwd=place)
    return next(place.glob("*.deb"))


if __name__ == "__main__":
    try:
        fetch()
    except (LookupError, subprocess.CalledProcessError) as error:
        sys.exit(f"no kernel for guests: {error}")
