"""`halocline fuzz`: random nets, split at random, against one process."""

import json
import sys
import warnings
from pathlib import Path

import click


@click.command()
@click.option("--seed", type=int, default=0, show_default=True, help="Which nets: the same seed gives the same ones.")
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, help="For how long."
)
@click.option("--ranks", type=click.IntRange(1, 64), default=8, show_default=True, help="At most so many, as threads.")
@click.option("--first", type=click.IntRange(0), default=0, help="The number of the first net; to repeat one.")
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="Write the first test there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
def command(seed: int, minutes: float, ranks: int, first: int, output: Path | None, as_json: bool) -> int:
    """Run random nets, split at random over up to RANKS ranks, and compare each with one process.

    Layers, skips, sizes, splits and modes are drawn. Loss, gradients and buffers must agree within 1e-9 in fp64. A net
    that does not is made as small as it still fails, and printed as a test. Exits 1 when there was one.
    """
    import torch

    from halocline.fuzz.search import Found, Tally, fuzz
    from halocline.fuzz.shrink import as_test

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Using padding='same'")
    tally = Tally()
    found: list[Found] = []
    shows = sys.stderr.isatty() and not as_json

    def look(tally: Tally) -> None:
        if shows:
            print(f"\r{tally.tried} nets, {len(found)} found", end="", file=sys.stderr, flush=True)

    for failure in fuzz(seed, 60 * minutes, ranks, first, tally, look):
        found.append(failure)
        test = as_test(failure.case, failure.problem)
        if output is not None and len(found) == 1:
            output.write_text(test)
        if not as_json:
            print(f"\nnet {failure.number} of seed {seed}: {failure.problem}\n\n{test}")
    if shows:
        print(file=sys.stderr)
    if as_json:
        failures = [
            {"number": f.number, "problem": f.problem, "test": as_test(f.case, f.problem)} for f in found
        ]  # fmt: skip
        print(json.dumps({"seed": seed, "tried": tally.tried, "unusable": tally.unusable, "failures": failures}))
    else:
        used = tally.tried - tally.unusable
        print(
            f"seed {seed}: {used} nets split at random ({tally.unusable} more could not be used), {len(found)} failed"
        )
    return 1 if found else 0
