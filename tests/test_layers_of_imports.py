"""A file imports only from what stands above it in this list: it is the order in which the package is read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import halocline

ROOT = Path(halocline.__file__).parent

# Files and folders of the package. A folder's files may import each other, but not in a circle.
ORDER = """
    errors garbage region mesh layout transfer graph
    comm
    ops
    source tracing watched autocast inline functional code_state capture
    gradients placement plan_file byhand program lowering recompute exchange
    cost elimination budget candidates problem sampled_program tables paper_search search auto
    agreement notice runtime prepared step step_overhead verify
    data models feed train
    simulate planning scaling report bench fuzz
    cli
""".split()


def imports(file: Path) -> Iterator[tuple[str, ...]]:
    """The modules of the package that a file imports, anywhere in it, as paths below the package."""
    folder = file.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ("halocline", *folder[: len(folder) - node.level + 1]) if node.level else ()
            start = ".".join((*above, *filter(None, [node.module])))
            names = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *path = name.split(".")
            if package == "halocline" and path:
                yield tuple(path)


def module(path: tuple[str, ...]) -> str | None:
    """The file of the package, without its ending, that `path` (a module, or a name in one) lies in."""
    for length in range(len(path), 0, -1):
        stem = "/".join(path[:length])
        if (ROOT / f"{stem}.py").is_file():
            return stem
        if (ROOT / stem / "__init__.py").is_file():
            return f"{stem}/__init__"
    return None


FILES = {str(file.relative_to(ROOT).with_suffix("")): file for file in sorted(ROOT.rglob("*.py"))}
READS = {name: {found for path in imports(file) if (found := module(path))} - {name} for name, file in FILES.items()}


def test_every_file_stands_in_the_list():
    assert {name.split("/")[0] for name in FILES} - {"__init__"} == set(ORDER)
    assert len(set(ORDER)) == len(ORDER)


@pytest.mark.parametrize("name", [name for name in FILES if name != "__init__"])
def test_imports_come_from_above(name):
    own = name.split("/")[0]
    above = ORDER[: ORDER.index(own) + 1]
    below = sorted(read for read in READS[name] if read.split("/")[0] not in above)
    assert not below, f"{name} imports {', '.join(below)}, which stand below {own}"


def test_no_folder_goes_in_a_circle():
    # `ops/__init__` imports all rules; that files of `ops` import what it registers is no circle of their own.
    reads = {name: {read for read in found if not read.endswith("__init__")} for name, found in READS.items()}
    done: set[str] = set()
    while ready := {name for name, found in reads.items() if name not in done and found <= done}:
        done |= ready
    assert done == set(reads), f"in a circle: {sorted(set(reads) - done)}"


def test_this_test_sees_imports(tmp_path, monkeypatch):
    (tmp_path / "ops").mkdir()
    for name in ("step", "ops/__init__", "ops/conv", "graph"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "ops/conv.py").write_text(
        "def f():\n    from ..step import Step\n    from . import conv\n    import halocline.graph\n"
    )
    monkeypatch.setattr("tests.test_layers_of_imports.ROOT", tmp_path)
    assert {module(path) for path in imports(tmp_path / "ops/conv.py")} == {"step", "ops/conv", "graph"}
