"""Public networks, unmodified: split in space and over samples they give the numbers of one process.

`python -m pytest -m slow tests/test_public_nets.py` runs every net, split in all ways, in training and evaluation.
"""

import copy
import os
from collections.abc import Sequence

import pytest

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.verify import Report, verify
from tests.nets_public import PUBLIC, PublicNet, ZooNet

NETS = {f"{package}: {name}": net for package, nets in PUBLIC.items() for name, net in nets.items()}
QUICK = [name for name, net in NETS.items() if not net.slow]
# Where evaluation runs other code than training: running statistics, dropout, fewer outputs.
EVALUATED = (
    "MONAI: BasicUNet 2-D", "MONAI: SegResNet", "MONAI: VNet", "MONAI: DynUNet 2-D, deep supervision",
    "MONAI: ResNet, shortcut A", "transformers: MobileNetV2", "transformers: SegFormer",
)  # fmt: skip
OVER_SAMPLES = (
    "MONAI: UNet 2-D", "MONAI: DenseNet", "MONAI: QuickNAT", "transformers: ConvNeXt V2", "transformers: BiT",
    "halocline: cosmoflow",
)  # fmt: skip
AUTOMATIC = ("MONAI: DynUNet 2-D, deep supervision", "MONAI: MedNeXt", "transformers: RegNet", "halocline: unet3d")
BOTH = ("MONAI: AttentionUnet", "transformers: ConvNeXt, stochastic depth", "transformers: PoolFormer")


def compare(name: str, plan: str, ranks: int, training: bool) -> None:
    package = name.partition(":")[0]
    if not os.environ.get("CI"):  # there the extra `nets` is installed, and nothing may be left out
        pytest.importorskip(package.lower())
    net: PublicNet | ZooNet = NETS[name]
    model, loss, batch = net.make(samples=0 if plan in ("spatial", "auto") else 2)
    model.train(training and loss is not None)

    def rank(comm: Comm) -> Report:
        return verify(copy.deepcopy(model), loss, batch, plan, comm=comm)

    report, *_ = run_threads(ranks, rank, timeout_s=300)
    assert report.passed, str(report)


@pytest.mark.parametrize("name", QUICK)
def test_split_in_space(name: str) -> None:
    compare(name, "spatial", NETS[name].ranks, training=True)


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_split_in_space(name: str) -> None:
    compare(name, "spatial", 2, training=False)


@pytest.mark.parametrize("name", OVER_SAMPLES)
def test_split_over_samples(name: str) -> None:
    compare(name, "sample", 2, training=True)


@pytest.mark.parametrize("name", AUTOMATIC)
def test_planned_automatically(name: str) -> None:
    compare(name, "auto", 2, training=True)


@pytest.mark.parametrize("name", BOTH)
def test_split_over_samples_and_space(name: str) -> None:
    compare(name, "n=2,w=2", 4, training=True)


WAYS: Sequence[tuple[str, int]] = (
    ("spatial", 2), ("spatial", 3), ("sample", 2), ("h=2,w=2", 4), ("n=2,w=3", 6), ("auto", 2),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("plan", "ranks"), WAYS)
@pytest.mark.parametrize("name", NETS)
def test_split_in_all_ways(name: str, plan: str, ranks: int, training: bool) -> None:
    compare(name, plan, ranks, training)
