"""Verbs about images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsec.base.clock import SystemClock
from dsec.base.errors import InvalidRequest
from dsec.base.quantity import format_size
from dsec.cli import parsing, progress
from dsec.cli.boundary import client, verb
from dsec.cli.options import Json
from dsec.cli.output import age, clean, print_json, print_table
from dsec.sdk import ImageEvents

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
    named = path.name.split(".")[0] if name is None else name
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


@verb
async def push(
    name: Annotated[str, typer.Argument(help="Name of an image.")], *, json: Json = False
) -> None:
    """Put an image into the store that nodes share."""
    async with client() as dsec:
        await follow(dsec.images.push(name), json=json)


async def follow(events: ImageEvents, *, json: bool) -> None:
    """Show the progress of an import, then the image it made."""
    image = (await progress.follow(events)).image
    if json:
        print_json(image)
    else:
        typer.echo(clean(image.name))
