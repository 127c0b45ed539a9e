"""The verbs of `dsec`, in the order its help shows them."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.cli import (
    boundary,
    copying,
    environments,
    images,
    inspecting,
    jobs,
    layers,
    network,
    phase,
    running,
    sandboxes,
    snapshots,
    state,
    store,
    tampering,
    traces,
)
from dsec.cli.options import COMMAND_CONTEXT, Json

SANDBOXES = "Sandboxes"
STATE = "State and history"
JOBS = "Jobs"
COMMANDS = "Commands and files"
PLATFORM = "Environments and nodes"

app = typer.Typer(
    name="dsec",
    help="Sandboxes for AI agents: isolated, stateful, started in milliseconds.",
    epilog="The API is at DSEC_API_URL with DSEC_API_KEY, else where `dsec up` said.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


@app.callback()
def options(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show where errors come from.")] = False,
) -> None:
    """Sandboxes for AI agents: isolated, stateful, started in milliseconds."""
    boundary.set_debug(debug=debug)


app.command("run", rich_help_panel=SANDBOXES, context_settings=COMMAND_CONTEXT)(running.run)
app.command("ls", rich_help_panel=SANDBOXES)(sandboxes.ls)
app.command("stop", rich_help_panel=SANDBOXES)(sandboxes.stop)
app.command("ps", rich_help_panel=SANDBOXES)(sandboxes.ps)
app.command("stats", rich_help_panel=SANDBOXES)(sandboxes.stats)
app.command("exec", rich_help_panel=COMMANDS, context_settings=COMMAND_CONTEXT)(running.execute)
app.command("shell", rich_help_panel=COMMANDS)(running.shell)
app.command("logs", rich_help_panel=COMMANDS)(inspecting.logs)
app.command("cp", rich_help_panel=COMMANDS)(copying.cp)

app.command("pause", rich_help_panel=STATE)(state.pause)
app.command("resume", rich_help_panel=STATE)(state.resume)
app.command("resize", rich_help_panel=STATE)(state.resize)
app.command("pack", rich_help_panel=STATE)(state.pack)
app.command("diff", rich_help_panel=STATE)(state.diff)
app.command("fork", rich_help_panel=STATE)(state.fork)
app.command("restore", rich_help_panel=STATE)(state.restore)
app.command("phase", rich_help_panel=STATE)(phase.enter)
app.command("tamper", rich_help_panel=STATE)(tampering.tamper)

snapshot = typer.Typer(help="Snapshots: what sandboxes had written.", no_args_is_help=True)
snapshot.command("ls")(snapshots.ls)
snapshot.command("show")(snapshots.show)
snapshot.command("rm")(snapshots.rm)
snapshot.command("diff")(snapshots.diff)
app.add_typer(snapshot, name="snapshot", rich_help_panel=STATE)

networks = typer.Typer(help="What sandboxes may reach.", no_args_is_help=True)
networks.command("show")(network.show)
networks.command("set")(network.set_rules)
app.add_typer(networks, name="network", rich_help_panel=STATE)

trace = typer.Typer(
    help="What has happened in sandboxes: `dsec trace SANDBOX` shows it.",
    no_args_is_help=True,
    cls=traces.ShowByDefault,
)
trace.command("show")(traces.show)
trace.command("diff")(traces.compare)
trace.command("replay")(traces.replay)
trace.command("branch")(traces.branch)
app.add_typer(trace, name="trace", rich_help_panel=STATE)

job = typer.Typer(help="Jobs: the sandboxes of one run together.", no_args_is_help=True)
job.command("ls")(jobs.ls)
job.command("show")(jobs.show)
job.command("pause")(jobs.pause)
job.command("resume")(jobs.resume)
job.command("reap")(jobs.reap)
job.command("lease", context_settings=COMMAND_CONTEXT)(jobs.lease)
app.add_typer(job, name="job", rich_help_panel=JOBS)

image = typer.Typer(help="Images sandboxes are started from.", no_args_is_help=True)
image.command("ls")(images.ls)
image.command("pull")(images.pull)
image.command("import")(images.import_archive)
image.command("build")(images.build)
image.command("push")(images.push)
image.command("rm")(images.rm)
app.add_typer(image, name="image", rich_help_panel=PLATFORM)

layer = typer.Typer(help="Workspaces and toolkits, laid over images.", no_args_is_help=True)
layer.command("publish")(layers.publish)
layer.command("ls")(layers.ls)
layer.command("show")(layers.show)
layer.command("rm")(layers.rm)
app.add_typer(layer, name="layer", rich_help_panel=PLATFORM)

env = typer.Typer(
    help="Environments: image, workspace and toolkits together.", no_args_is_help=True
)
env.command("lint")(environments.lint)
env.command("trace", context_settings=COMMAND_CONTEXT)(environments.trace)
env.command("stat")(environments.stat)
app.add_typer(env, name="env", rich_help_panel=PLATFORM)

shared = typer.Typer(help="The store that nodes share.", no_args_is_help=True)
shared.command("show")(store.show)
shared.command("gc")(store.gc)
app.add_typer(shared, name="store", rich_help_panel=PLATFORM)

node = typer.Typer(help="Nodes sandboxes run on.", no_args_is_help=True)
node.command("ls")(inspecting.nodes)
app.add_typer(node, name="node", rich_help_panel=PLATFORM)


@app.command(rich_help_panel=PLATFORM)
@boundary.verb
async def version(*, json: Json = False) -> None:
    """Show the versions of this client and of the platform it talks to."""
    await inspecting.version(json=json)


if __name__ == "__main__":
    app()
