"""`halocline run`: start a script on several ranks of this host."""

import sys

import click


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--ranks", type=click.IntRange(1), required=True, help="How many ranks to start.")
@click.option("--transport", type=click.Choice(["auto", "mpi", "gloo", "nccl"]), default="auto", show_default=True)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(ranks: int, transport: str, script: str, arguments: tuple[str, ...]) -> int:
    """Start N ranks of SCRIPT on this host, with the transport and the threads of each set well.

    The exit status is 0 when every rank ends well. When one fails, the others are stopped.
    """
    from halocline.comm.launch import launch

    return launch([sys.executable, script, *arguments], ranks, transport)
