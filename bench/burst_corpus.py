"""A hundred different environments of real content for `bench.burst`.

An image is two layers: one of ten bases and an add-on that only this image has. A base is a whole
Debian with python3 (the same build for all, over the node's own package sources) and packages of
its own, some 100 MB of them. An add-on is eight Debian packages, never the same eight. All packages
are unpacked as they come from the mirror; their scripts do not run. A workspace is a wheel from PyPI,
unpacked; a toolkit is a program from PyPI with all it depends on. Every environment has another
image, and pairs it with one of the workspaces and two of the toolkits.

What is the same and what is not: images of one base share that layer, and both ways under
comparison fetch a shared layer once. Two bases have most files in common, and so have two add-ons
with a package in common, but never the layout: the directories of each are shuffled, as they are
when images are built at different times. So equal bytes lie at other places of other chunks; how
many chunks there are, and how many distinct ones, is printed by the benchmark.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import corpus
from bench.corpus import Packed
from bench.harness import say
from dsec.images import debian
from dsec.kit.blocking import in_thread
from dsec.kit.together import together

BASES: dict[str, tuple[str, ...]] = {
    "c": ("gcc-12", "cpp-12", "libgcc-12-dev", "g++-12", "libstdc++-12-dev", "libc6-dev"),
    "go": ("golang-1.19-src", "golang-golang-x-tools-dev", "golang-golang-x-net-dev"),
    "java": ("openjdk-17-jre-headless",),
    "llvm": ("libllvm14", "libclang-cpp14"),
    "node": ("libnode108", "nodejs", "node-typescript", "libicu72", "git"),
    "sql": ("postgresql-15", "mariadb-server-core"),
    "r": ("r-base-core", "libopenblas0-pthread", "r-cran-matrix", "r-recommended"),
    "edit": ("emacs-common", "vim-runtime"),
    "boost": ("libboost1.74-dev",),
    "script": ("libruby3.1", "perl-modules-5.36", "erlang-base", "php8.2-cli", "php8.2-common"),
}
ADD_ONS = (
    *("python3-numpy", "python3-scipy", "python3-pandas-lib", "python3-pandas", "python3-sympy"),
    *("python3-matplotlib", "python3-django", "python3-sklearn-lib", "python3-networkx"),
    *("python3-twisted", "python3-lxml", "python3-sqlalchemy", "python3-jedi", "python3-nltk"),
    *("python3-skimage-lib", "python3-statsmodels-lib", "python3-h5py-serial", "python3-astropy"),
    *("libgtk-3-common", "libpython3.11-dev", "texlive-binaries", "doxygen", "cmake-data", "gdb"),
    *("libqt5gui5", "libqt5widgets5", "ffmpeg", "libavcodec59", "imagemagick-6-common"),
    *("sphinx-common", "mercurial-common", "subversion", "sqlite3", "nginx-common", "redis-tools"),
)
WORKSPACES = (
    *("django", "networkx", "click", "rich", "pygments", "docutils", "sphinx", "sqlglot"),
    *("setuptools", "pip", "lark", "mistune", "babel", "jmespath", "tqdm", "boltons", "sqlparse"),
    *(
        "pyparsing",
        "cachetools",
        "parso",
        "tomlkit",
        "wcwidth",
        "markdown",
        "toolz",
        "mpmath",
        "pyasn1",
    ),
)
TOOLKITS = ("pytest", "black", "mypy", "pylint", "ruff", "coverage", "flake8", "jedi")
IMAGES = 100
ADDED = 8
_TO_USR = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """One of the hundred: the names of its parts."""

    image: str
    base: str
    add_on: str
    workspace: str
    toolkits: tuple[str, str]

    @property
    def layers(self) -> list[str]:
        """Files of its layers, bottom first."""
        return [self.base, self.add_on, self.workspace, *self.toolkits]


def environments() -> list[Environment]:
    """All of them; no two have the same image."""
    bases = list(BASES)
    kits = list(itertools.combinations(TOOLKITS, 2))
    return [
        Environment(
            image=f"image{number:03}",
            base=f"base-{bases[number % len(bases)]}",
            add_on=f"add-on-{number:03}",
            workspace=f"workspace-{WORKSPACES[number % len(WORKSPACES)]}",
            toolkits=_kits(kits[number * 5 % len(kits)]),
        )
        for number in range(IMAGES)
    ]


def _kits(pair: tuple[str, str]) -> tuple[str, str]:
    return f"toolkit-{pair[0]}", f"toolkit-{pair[1]}"


def add_on_packages(number: int) -> tuple[str, ...]:
    """The packages of an add-on; no two have the same."""
    return tuple(random.Random(number).sample(ADD_ONS, ADDED))


async def make(place: Path) -> None:
    """Make all layers, as compressed tars, and the image layouts around them."""
    scratch = place / "scratch"
    await together(
        [
            partial(corpus.debian_tree, ("python3",), scratch / "debian"),
            partial(in_thread, "build", _fetch_packages, scratch),
            partial(in_thread, "build", _fetch_from_pypi, scratch),
        ]
    )
    say("packing layers")
    packed: dict[str, Packed] = {}

    async def pack(name: str, roots: Sequence[Path]) -> None:
        packed[name] = await in_thread("build", _pack, name, roots, place)

    await together(partial(pack, name, roots) for name, roots in _layers(scratch).items())
    corpus.save_packed(packed, place / "layers.json")
    for each in environments():
        image = [(place / packed[name].path, packed[name]) for name in (each.base, each.add_on)]
        corpus.write_layout(image, place / "layouts" / each.image)
    await in_thread("disk", shutil.rmtree, scratch)


def _layers(scratch: Path) -> dict[str, list[Path]]:
    """What each layer is made of."""
    layers: dict[str, list[Path]] = {}
    for name, packages in BASES.items():
        layers[f"base-{name}"] = [scratch / "debian", *(scratch / "debs" / p for p in packages)]
    for number in range(IMAGES):
        packages = add_on_packages(number)
        layers[f"add-on-{number:03}"] = [scratch / "debs" / package for package in packages]
    for name in WORKSPACES:
        layers[f"workspace-{name}"] = [scratch / "workspaces" / name]
    for name in TOOLKITS:
        layers[f"toolkit-{name}"] = [scratch / "toolkits" / name]
    return layers


def _pack(name: str, roots: Sequence[Path], place: Path) -> Packed:
    listing = place / "scratch" / f"{name}.list"
    listing.write_text("".join(f"{line}\n" for line in _listing(roots, random.Random(name))))
    arguments = ["--no-recursion", "--no-unquote", f"--files-from={listing}"]
    return corpus.pack_tar(arguments, place / f"{name}.tar.gz")


def _listing(roots: Sequence[Path], dice: random.Random) -> Iterator[str]:
    """A list for `tar -T`: directories, then what is in them, one directory after the other."""
    seen: set[str] = set()
    directories = [
        (root, Path(directory).relative_to(root), names, files)
        for root in roots
        for directory, names, files in os.walk(root)
    ]
    for root, where, _names, _files in directories:
        if str(where) not in seen:
            seen.add(str(where))
            yield f"--directory={root}"
            yield f"./{where}"
    dice.shuffle(directories)
    for root, where, names, files in directories:
        yield f"--directory={root}"
        links = [name for name in names if (root / where / name).is_symlink()]
        for path in (str(where / name) for name in sorted([*files, *links])):
            if path not in seen:
                seen.add(path)
                yield f"./{path}"


# -- where it comes from -----------------------------------------------------------------------


def _fetch_packages(scratch: Path) -> None:
    """Download Debian packages from the node's own Debian sources, and unpack each."""
    apt = scratch / "apt"
    for part in ("lists/partial", "cache/archives/partial", "sources", "debs"):
        (apt / part).mkdir(parents=True)
    (apt / "sources/debian.sources").write_bytes(debian.plan(None, ()).stdin())
    settings = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": apt / "sources",
        "Dir::State::Lists": apt / "lists",
        "Dir::State::Status": "/dev/null",  # what the node has installed is no candidate
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "root",
    }
    command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    subprocess.run([*command, "update"], check=True)
    wanted = sorted({*itertools.chain(*BASES.values()), *ADD_ONS})
    subprocess.run([*command, "download", *wanted], check=True, cwd=apt / "debs")
    for file in (apt / "debs").iterdir():
        tree = scratch / "debs" / file.name.partition("_")[0]
        tree.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "-x", file, tree], check=True)
        _merge_usr(tree)


def _merge_usr(tree: Path) -> None:
    """Move what packages still ship in /bin and /lib to where a Debian of today has it."""
    for name in _TO_USR:
        old = tree / name
        if old.is_dir() and not old.is_symlink():
            (tree / "usr").mkdir(exist_ok=True)
            subprocess.run(["cp", "-al", old, tree / "usr"], check=True)
            shutil.rmtree(old)


def _fetch_from_pypi(scratch: Path) -> None:
    corpus.unpack_wheels(
        WORKSPACES, scratch, lambda name: scratch / "workspaces" / name / "workspace"
    )
    for name in TOOLKITS:
        corpus.install([name], scratch / "toolkits" / name / "opt" / name)
