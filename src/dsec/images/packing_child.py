"""A large difference packed in a process of its own: its memory is bounded, its work delays nobody.

`python -m dsec.images.packing_child --out OUT --upper DIRECTORY`; `packing` starts it. It reads
`<out>/job.json`, looks, says `Looked`, waits for a byte from the pipe `<out>/go`, takes what is new,
says `Taken`, and at the end what came of it.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.base.errors import DsecError, PayloadTooLarge
from dsec.images.children import Refused, refusal
from dsec.images.convert import Converted
from dsec.images.disk import full_disk_named
from dsec.images.oci.layer import Limits
from dsec.images.packer import Packer
from dsec.images.residue import Sieve
from dsec.linux.process import die_with_parent

JOB, GO = "job.json", "go"
_MEMORY_BYTES = 6 << 30


class PackJob(Struct, kw_only=True):
    """What to leave out, and how much there may be."""

    clean: bool
    exclude: list[str]
    entries: int
    size_bytes: int


class Looked(Struct, tag="looked"):
    """It waits for the sandbox to stand still."""


class Taken(Struct, tag="taken"):
    """The sandbox may run."""


class Finished(Struct, tag="finished"):
    """The layer is made."""

    meta: Converted
    left_out: int


Said = Looked | Taken | Finished | Refused


def main(argv: Sequence[str]) -> int:
    """Do what the command line says; 0 also when it is refused, which is an answer."""
    parser = argparse.ArgumentParser(prog="python -m dsec.images.packing_child")
    parser.add_argument("--parent", type=int, default=0, help="die with this process")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--upper", type=Path, required=True)
    arguments = parser.parse_args(argv)
    if arguments.parent:
        die_with_parent(arguments.parent)
    _confine()
    for said in steps(arguments.out, arguments.upper):
        sys.stdout.write(msgspec.json.encode(said).decode() + "\n")
        sys.stdout.flush()
    return 0


def _confine() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o077)
    gc.disable()  # a tree has no cycles


def steps(out: Path, upper: Path) -> Iterator[Said]:
    """Do the job; what to say after each step.

    Raises:
        OSError: this host failed, not the sandbox.
    """
    try:
        with full_disk_named(out):
            yield from _packed(out, upper)
    except DsecError as error:
        yield refusal(error)
    except MemoryError:
        yield refusal(PayloadTooLarge("it takes more memory than packing may have"))


def _packed(out: Path, upper: Path) -> Iterator[Said]:
    job = msgspec.json.decode((out / JOB).read_bytes(), type=PackJob)
    sieve = Sieve(clean=job.clean, exclude=job.exclude)
    with Packer(out, upper, sieve, Limits(job.entries, job.size_bytes)) as packer:
        packer.look()
        yield Looked()
        with (out / GO).open("rb", buffering=0) as pipe:
            pipe.read(1)
        packer.take()
        yield Taken()
        packed = packer.finish()
        yield Finished(packed.converted, packed.left_out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
