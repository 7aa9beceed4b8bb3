"""`Machine`: the numbers of a machine. Always an argument, never a constant."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any

import torch

from ..errors import PlanError
from ..mesh import Mesh, prime_mesh


@dataclass(frozen=True)
class Level:
    """One level of the interconnect: what joins `ranks` ranks (None: any number).

    A message of n bytes takes `latency_s + n * seconds_per_byte` when it has the link to itself; `shared_by` ranks of
    the level below use one link together.
    """

    name: str
    ranks: int | None
    latency_s: float
    seconds_per_byte: float
    shared_by: int = 1


@dataclass(frozen=True)
class Roofline:
    """The time of a local computation from its flops and bytes: `overhead_s`, and the longer of both.

    Of the peak `flops_per_s` a computation of w flops reaches `efficiency * w / (w + half_flops)`: small work is slow.
    To a time that was measured instead, `runtime_s` is added: what the runtime does around it. What it does around a
    fetch in one direction (beside bytes and messages) takes `fetch_s`, around the sum of a partial value `reduce_s`;
    both hold what ranks wait for each other because none is ever exactly as fast as the next.
    """

    flops_per_s: Mapping[str, float]
    memory_seconds_per_byte: float
    efficiency: float
    half_flops: float
    overhead_s: float
    runtime_s: float = 0.0
    fetch_s: float = 0.0
    reduce_s: float = 0.0

    def seconds(self, flops: float, moved_bytes: float, dtype: torch.dtype) -> float:
        """The time of a computation that does `flops` and moves `moved_bytes` to and from memory."""
        peak = self.flops_per_s.get(str(dtype).removeprefix("torch."), self.flops_per_s["float32"])
        computing = (flops + self.half_flops) / (peak * self.efficiency) if flops else 0.0
        return self.overhead_s + max(computing, moved_bytes * self.memory_seconds_per_byte)


AROUND = ("runtime_s", "fetch_s", "reduce_s")


@dataclass(frozen=True)
class Machine:
    """Levels of the interconnect from fastest to slowest, reduction rate, memory a rank, and local computation.

    `overlap` is the share of a gradient sum that can run beside computation; `table` names a file of measured local
    times that come before the roofline. Raises PlanError for figures that no machine has.
    """

    name: str
    levels: tuple[Level, ...]
    memory_bytes: int
    reduction_s_per_byte: float
    local: Roofline
    overlap: float = 1.0
    table: str | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = [level.ranks for level in self.levels if level.ranks is not None]
        if not self.levels or known != sorted(set(known)):
            raise PlanError(f"machine `{self.name}`: levels must go from few ranks to many; found {known}")
        if any(big % small for small, big in zip(known, known[1:])):
            raise PlanError(f"machine `{self.name}`: each level must hold whole ones of the level below; found {known}")
        if any(level.ranks is None for level in self.levels[:-1]):
            raise PlanError(f"machine `{self.name}`: only the last level may leave out `ranks`")

    @cached_property
    def capacity(self) -> float:
        """How many ranks the machine has at most."""
        return self.levels[-1].ranks or inf

    def mesh(self, ranks: int) -> Mesh:
        """The prime mesh of `ranks` ranks whose axes keep within levels wherever the levels divide the ranks.

        Raises PlanError when the machine has fewer ranks.
        """
        if ranks > self.capacity:
            raise PlanError(f"machine `{self.name}` has {self.capacity} ranks, but {ranks} are asked for")
        sizes: list[int] = []
        rest = ranks
        for level in self.levels:
            inner = _product(sizes)
            if level.ranks and level.ranks < ranks and ranks % level.ranks == 0:
                sizes = [*prime_mesh(level.ranks // inner).sizes, *sizes]
                rest = ranks // level.ranks
        sizes = [*prime_mesh(rest).sizes, *sizes]
        return Mesh(tuple((f"r{i}", size) for i, size in enumerate(sizes)))

    def level_of(self, a: int, b: int) -> int:
        """The number of the level that joins ranks `a` and `b`."""
        for number, level in enumerate(self.levels):
            if level.ranks is None or a // level.ranks == b // level.ranks:
                return number
        return len(self.levels) - 1

    def level_of_axis(self, mesh: Mesh, axis: str) -> int:
        """The number of the level that joins all ranks along `axis`."""
        known = self._levels.setdefault(mesh.axes, {})
        if axis not in known:
            span = mesh.parts(mesh.names[mesh.names.index(axis) :])
            inside = (n for n, level in enumerate(self.levels) if level.ranks is None or level.ranks % span == 0)
            known[axis] = next(inside, len(self.levels) - 1)
        return known[axis]

    @cached_property
    def _levels(self) -> dict[tuple[tuple[str, int], ...], dict[str, int]]:
        return {}

    @cached_property
    def sums_s(self) -> dict[tuple[tuple[tuple[str, int], ...], tuple[str, ...], float], float]:
        """The allreduce times that were worked out before, by mesh, axes and bytes."""
        return {}

    def to_toml(self) -> str:
        """The text that `parse_machine` reads back as this machine."""
        lines = [f'name = "{self.name}"', f"memory_bytes = {self.memory_bytes}"]
        lines += [f"reduction_s_per_byte = {self.reduction_s_per_byte!r}", f"overlap = {self.overlap!r}"]
        lines += [f'table = "{self.table}"'] if self.table else []
        for level in self.levels:
            lines += ["", "[[level]]", f'name = "{level.name}"']
            lines += [f"ranks = {level.ranks}"] if level.ranks is not None else []
            lines += [f"latency_s = {level.latency_s!r}", f"seconds_per_byte = {level.seconds_per_byte!r}"]
            lines += [f"shared_by = {level.shared_by}"]
        local = self.local
        lines += ["", "[local]", f"overhead_s = {local.overhead_s!r}", f"runtime_s = {local.runtime_s!r}"]
        lines += [f"fetch_s = {local.fetch_s!r}", f"reduce_s = {local.reduce_s!r}"]
        lines += [f"memory_seconds_per_byte = {local.memory_seconds_per_byte!r}"]
        lines += [f"efficiency = {local.efficiency!r}", f"half_flops = {local.half_flops!r}"]
        lines += ["", "[local.flops_per_s]", *(f"{dtype} = {rate!r}" for dtype, rate in local.flops_per_s.items())]
        if self.notes:
            lines += ["", "[notes]", *(f"{key} = {_toml(value)}" for key, value in self.notes.items())]
        return "\n".join([*lines, ""])


def _toml(value: Any) -> str:
    return repr(value) if isinstance(value, (int, float)) else '"' + str(value).replace('"', "'") + '"'


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


class _Table:
    """A TOML table that is read key by key; what is missing, unknown or out of range is an error that names it."""

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise PlanError(f"{where}: expected a table of keys and values, found {values!r}")
        self.where, self.values = where, dict(values)

    def take(self, key: str, expected: str, default: Any = ...) -> Any:
        if key not in self.values:
            if default is not ...:
                return default
            raise PlanError(f"{self.where}: `{key}` is missing; expected {expected}")
        return self.values.pop(key)

    def number(self, key: str, expected: str, least: float = 0.0, above: bool = True, default: Any = ...) -> float:
        value = self.take(key, expected, default)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value and value != inf
        if not good or value < least or (above and value == least):
            raise PlanError(f"{self.where}: `{key}` is {value!r}; expected {expected}")
        return float(value)

    def whole(self, key: str, expected: str, default: Any = ...) -> int:
        value = self.take(key, expected, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"{self.where}: `{key}` is {value!r}; expected {expected}")
        return value

    def text(self, key: str, default: Any = ...) -> Any:
        value = self.take(key, "a text", default)
        if value is not default and not isinstance(value, str):
            raise PlanError(f"{self.where}: `{key}` is {value!r}; expected a text")
        return value

    def done(self, known: str) -> None:
        if self.values:
            raise PlanError(f"{self.where}: `{next(iter(self.values))}` is not a key here (keys: {known})")


def parse_machine(text: str, where: str) -> Machine:
    """The machine that a TOML text describes. Raises PlanError that names the key and what was expected of it."""
    try:
        top = _Table(where, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{where}: not TOML: {error}") from error
    found = top.take("level", "one or more [[level]] tables, fastest first")
    if not isinstance(found, list) or not found:
        raise PlanError(f"{where}: `level` must be one or more [[level]] tables, fastest first; found {found!r}")
    levels = tuple(_level(_Table(f"{where}: level {number}", values)) for number, values in enumerate(found))
    local = _local(_Table(f"{where}: local", top.take("local", "a table [local]")))
    overlap = top.number("overlap", "a share from 0 to 1", above=False, default=1.0)
    if overlap > 1:
        raise PlanError(f"{where}: `overlap` is {overlap}; expected a share from 0 to 1")
    machine = Machine(
        top.text("name"),
        levels,
        top.whole("memory_bytes", "a positive whole number of bytes"),
        top.number("reduction_s_per_byte", "seconds a byte, above 0"),
        local,
        overlap,
        top.text("table", None),
        top.take("notes", "a table", {}),
    )
    top.done("name, memory_bytes, reduction_s_per_byte, overlap, table, level, local, notes")
    return machine


def _level(table: _Table) -> Level:
    level = Level(
        table.text("name"),
        table.whole("ranks", "a positive whole number of ranks") if "ranks" in table.values else None,
        table.number("latency_s", "seconds, above 0"),
        table.number("seconds_per_byte", "seconds a byte, above 0"),
        table.whole("shared_by", "a positive whole number of ranks", 1),
    )
    table.done("name, ranks, latency_s, seconds_per_byte, shared_by")
    return level


def _local(table: _Table) -> Roofline:
    rates = _Table(f"{table.where}.flops_per_s", table.take("flops_per_s", "a table from dtypes to flops a second"))
    names = list(rates.values)
    if "float32" not in names:
        raise PlanError(f"{rates.where}: `float32` is missing; expected its peak in flops a second")
    efficiency = table.number("efficiency", "a share above 0, at most 1")
    if efficiency > 1:
        raise PlanError(f"{table.where}: `efficiency` is {efficiency}; expected a share above 0, at most 1")
    local = Roofline(
        {name: rates.number(name, "flops a second, above 0") for name in names},
        table.number("memory_seconds_per_byte", "seconds a byte, above 0"),
        efficiency,
        table.number("half_flops", "flops, at least 0", above=False),
        table.number("overhead_s", "seconds, at least 0", above=False),
        *(table.number(key, "seconds, at least 0", above=False, default=0.0) for key in AROUND),
    )
    table.done(f"flops_per_s, memory_seconds_per_byte, efficiency, half_flops, overhead_s, {', '.join(AROUND)}")
    return local


def shipped() -> tuple[str, ...]:
    """The names of the machines that come with halocline."""
    files = resources.files(__package__).joinpath("machines").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load_machine(name_or_file: str) -> Machine:
    """The shipped machine of that name, or the one in a TOML file. `this` is `calibrate.this_machine`'s to find.

    Raises PlanError for an unknown name (listing the known) and for a file that does not describe a machine.
    """
    if name_or_file in shipped():
        text = resources.files(__package__).joinpath("machines", f"{name_or_file}.toml").read_text()
        return parse_machine(text, f"machine `{name_or_file}`")
    path = Path(name_or_file)
    if not path.is_file():
        raise PlanError(
            f"machine `{name_or_file}`: neither a known machine (this, {', '.join(shipped())}) nor a file; "
            "`halocline calibrate -o FILE.toml` writes one for this host"
        )
    return parse_machine(path.read_text(), f"machine file {name_or_file}")
