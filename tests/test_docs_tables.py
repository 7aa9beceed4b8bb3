"""The pages that commands write are up to date."""

import runpy
from pathlib import Path

import pytest

from tests.nets_public import PUBLIC

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_of_ops_is_up_to_date() -> None:
    page = runpy.run_path(str(DOCS / "list_ops.py"))["page"]
    assert page() == (DOCS / "ops.md").read_text(), "run python docs/list_ops.py"


def test_the_page_of_networks_has_every_net() -> None:
    page = (DOCS / "networks.md").read_text()
    for package, nets in PUBLIC.items():
        section = page.partition(f"## {package}\n")[2].partition("\n## ")[0]
        rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines()[3:] if line]
        assert rows == list(nets), "run python docs/list_networks.py"


@pytest.mark.parametrize(("package", "name"), [("halocline", "resnet-small"), ("halocline", "cosmoflow")])
def test_a_row_is_that_of_the_net_as_it_is_split_now(package: str, name: str) -> None:
    row = runpy.run_path(str(DOCS / "list_networks.py"))["row"]
    assert row(name, *PUBLIC[package][name].make()) in (DOCS / "networks.md").read_text().splitlines(), (
        "run python docs/list_networks.py"
    )
