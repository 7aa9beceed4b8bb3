"""`halocline verify`: one step, split against one process."""

import dataclasses
import json

import click

from halocline.cli.options import dtype_of, dtype_option, load_on, model_options
from halocline.cli.ranks import joined, relaunched

SAMPLES = 4  # enough for a batch to be one; verifying takes the memory of one process


@click.command()
@model_options
@dtype_option("fp64")
@click.option("--tolerance", type=float, help="Largest relative deviation (default: by dtype; 1e-9 for fp64).")
@click.pass_obj
def command(
    arguments: list[str],
    /,
    model: str,
    ranks: int | None,
    plan: str,
    size: int | None,
    width: float,
    batch: int | None,
    seed: int,
    as_json: bool,
    columns: int | None,
    dtype: str,
    tolerance: float | None,
) -> int:
    """Compare one step of MODEL, split over the ranks, with one process.

    Compared are the loss, the gradient of every parameter and every buffer. MODEL is a name in the zoo, or
    path/to/file.py:factory. Exits 1 when they differ, and names the first layer that does.
    """
    if (status := relaunched(ranks, arguments)) is not None:
        return status
    from halocline.feed import feed_of
    from halocline.placement import Plan
    from halocline.verify import verify

    with joined() as comm:
        job = load_on(comm, model, plan, size, width, batch, dtype_of(dtype), seed)
        samples = job.batch if batch or isinstance(job.plan, Plan) else min(job.batch, SAMPLES)
        whole = feed_of(job.entry, job.size, samples, samples, dtype_of(dtype), seed).whole(0)
        loss = job.entry.loss() if job.entry.loss else None
        report = verify(job.net, loss, whole, job.plan, comm=comm, tolerance=tolerance)
        if comm.rank == 0 and as_json:
            document = {
                "model": model, "ranks": comm.size, "transport": comm.name, "plan": plan, "dtype": dtype,
                "size": job.size, "width": width, "batch": samples,
                "passed": report.passed, "tolerance": report.tolerance, "first_difference": report.first_difference,
                "deviations": [dataclasses.asdict(deviation) for deviation in report.deviations],
            }  # fmt: skip
            print(json.dumps(document))
        elif comm.rank == 0:
            shapes = " ".join(str(tuple(x.shape)) for x in whole)
            print(f"{model} ({dtype}), batch {shapes}: plan {plan} on {comm.size} ranks ({comm.name})")
            print(report)
        return 0 if report.passed else 1
