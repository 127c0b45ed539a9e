"""Verbs about images."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Protocol

import typer

from dsec.base.clock import SystemClock
from dsec.base.errors import InvalidRequest, Unavailable
from dsec.base.quantity import format_size
from dsec.cli import parsing
from dsec.cli.boundary import client, verb
from dsec.cli.options import Json
from dsec.cli.output import age, clean, note, print_json, print_table
from dsec.sdk import ImageEvents
from dsec.wire.public_v1 import ImageProgress, ImageReady, ImageView

DISTRIBUTIONS = ("debian",)
Name = Annotated[str | None, typer.Option("--name", "-n", help="Name to give it.")]


@verb
async def ls(*, json: Json = False) -> None:
    """List the images there are."""
    async with client() as dsec:
        found = await dsec.images.list()
    if json:
        print_json(found)
        return
    now = SystemClock().now()
    print_table(
        ["NAME", "DIGEST", "LAYERS", "SIZE", "AGE", "SOURCE"],
        [
            [
                image.name,
                image.digest.removeprefix("sha256:")[:12],
                str(len(image.layers)),
                format_size(image.size_bytes),
                age(now - image.created_at) if image.created_at else "",
                image.source,
            ]
            for image in found
        ],
    )


@verb
async def pull(
    reference: Annotated[str, typer.Argument(help="E.g. docker.io/library/python:3.12.")],
    *,
    name: Name = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Do not check the registry's certificate.")
    ] = False,
    json: Json = False,
) -> None:
    """Import an image from an OCI registry.

    Example: dsec image pull docker.io/library/python:3.12 --name python
    """
    async with client() as dsec:
        await follow(dsec.images.pull(reference, name, tls_verify=not insecure), json=json)


@verb
async def import_archive(
    path: Annotated[Path, typer.Argument(help="A tar: OCI layout, docker save, or root files.")],
    *,
    name: Name = None,
    json: Json = False,
) -> None:
    """Import an archive from this machine.

    Example: docker save myimage | gzip > my.tgz; dsec image import my.tgz --name myimage
    """
    if not path.is_file():
        raise InvalidRequest(f"no file {path}")
    named = name or path.name.split(".")[0]
    async with client() as dsec:
        await follow(dsec.images.import_archive(path, named), json=json)


@verb
async def build(
    distribution: Annotated[str, typer.Argument(help="Which distribution.")] = "debian",
    *,
    name: Name = None,
    suite: Annotated[str | None, typer.Option("--suite", help="E.g. bookworm.")] = None,
    package: Annotated[
        list[str] | None, typer.Option("--package", "-p", help="Package to add; repeatable.")
    ] = None,
    json: Json = False,
) -> None:
    """Build a distribution image over the node's own package mirror.

    Example: dsec image build debian -p git -p python3 --name tools
    """
    parsing.one_of(DISTRIBUTIONS, distribution, "distribution")
    async with client() as dsec:
        events = dsec.images.build(distribution, name, package or [], suite)
        await follow(events, json=json)


@verb
async def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of images.")],
) -> None:
    """Remove images. One that a sandbox runs from stays until that has stopped."""
    async with client() as dsec:
        for name in names:
            await dsec.images.remove(name)
            typer.echo(clean(name))


class _Shown(Protocol):
    def __call__(self, progress: ImageProgress) -> None: ...


async def follow(events: ImageEvents, *, json: bool) -> None:
    """Show the progress of an import, then the image it made."""
    image: ImageView | None = None
    with _bars() if sys.stderr.isatty() else _lines() as show:
        async with events:
            async for event in events:
                if isinstance(event, ImageReady):
                    image = event.image
                else:
                    show(event)
    if image is None:
        raise Unavailable("the import ended without an image")
    if json:
        print_json(image)
    else:
        typer.echo(clean(image.name))


@contextmanager
def _lines() -> Iterator[_Shown]:
    last = ""

    def show(progress: ImageProgress) -> None:
        nonlocal last
        if progress.step != last:
            last = progress.step
            note(progress.step)

    yield show


@contextmanager
def _bars() -> Iterator[_Shown]:
    from rich.console import Console  # here: only a terminal needs it
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def show(progress: ImageProgress) -> None:
            total = progress.total or None
            if progress.step not in tasks:
                tasks[progress.step] = bars.add_task(escape(clean(progress.step)), total=total)
            bars.update(tasks[progress.step], completed=progress.done, total=total)

        yield show
