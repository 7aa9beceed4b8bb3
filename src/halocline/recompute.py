"""Recomputation: what a segment of the net makes is forgotten after its forward pass, and made again for the backward.

Kept are the values that enter a segment. The second time is as the first: the same communication in the same order on
all ranks, the same masks (random ops draw by step and place), the buffers as they were, which are not updated again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from .errors import PlanError
from .graph import Graph, Node
from .program import Again, Compute, Fetch, Free, Gradient, Instruction, Once, Program, Reduce, Start, Wait, WaitAdjoint

Segments = tuple[tuple[str, ...], ...]


def segments(graph: Graph, patterns: Sequence[str]) -> Segments:
    """The nodes under the modules that `patterns` name, a segment for each module: `down.*` is one for each child.

    Raises PlanError for a pattern that no module matches.
    """
    found: list[tuple[str, list[str]]] = []
    matched: set[str] = set()
    for node in graph.nodes:
        prefix = next(
            (prefix for prefix in _prefixes(node) for pattern in patterns if fnmatchcase(prefix, pattern)), None
        )
        if prefix is None:
            found.append(("", []))
            continue
        matched |= {pattern for pattern in patterns if fnmatchcase(prefix, pattern)}
        if not found or found[-1][0] != prefix:
            found.append((prefix, []))
        found[-1][1].append(node.name)
    for pattern in patterns:
        if pattern not in matched:
            names = ", ".join(
                list(dict.fromkeys(node.origin.module for node in graph.nodes if node.origin.module))[:12]
            )
            raise PlanError(f"recompute: no layer is in a module named like `{pattern}` (layers: {names}, ...)")
    return tuple(tuple(names) for _, names in found if names)


def _prefixes(node: Node) -> list[str]:
    """The module of a node and those around it, outermost first."""
    parts = node.origin.module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts)) if node.origin.module]


def with_recomputation(program: Program) -> Program:
    """The program that recomputes the segments of its plan; names that its graph does not have are left out."""
    needed = [nodes for names in program.placement.plan.recompute for nodes in _runs(program, names)]
    blocks = [_Block(program, nodes) for nodes in needed if nodes]
    if not blocks:
        return program
    kept = frozenset(name for block in blocks for name in block.enters)
    first_user = {name: number for number, block in reversed(list(enumerate(blocks))) for name in block.enters}
    backward: list[Instruction] = []
    for instruction in program.backward:
        block = next((b for b in blocks if type(instruction) is Gradient and instruction.node in b.nodes), None)
        if block is not None and not block.done:
            at = len(backward)
            while at and isinstance(backward[at - 1], WaitAdjoint):  # recomputed while these are under way
                at -= 1
            gone = tuple(name for name in block.enters if blocks[first_user[name]] is block)
            backward[at:at] = [*block.instructions(), *([Free(gone)] if gone else [])]
            block.done = True
        backward.append(instruction)
    made = {node.name: node for node in program.graph.nodes}
    return replace(
        program,
        forward=tuple(_without(program.forward, kept)),
        backward=tuple(backward),
        overwrite=frozenset(name for name in program.overwrite if made[name].inputs[0] not in kept),
        recomputed=frozenset(name for block in blocks for name in block.nodes),
        kept=kept,
    )


def _runs(program: Program, names: Iterable[str]) -> list[list[Node]]:
    """The nodes of a segment that are to be run again, in runs without other nodes between them."""
    wanted, runs = set(names), [list[Node]()]
    for node in program.graph.nodes:
        if node.name in wanted:
            runs[-1].append(node)
        elif runs[-1]:
            runs.append([])
    return [_needed(program, run) for run in runs]


def _needed(program: Program, run: Sequence[Node]) -> list[Node]:
    """Those that have a gradient, or that such a one reads."""
    needed: set[str] = set()
    for node in reversed(run):
        if node.name in program.differentiable or node.name in needed:
            needed |= {node.name, *node.inputs}
    return [node for node in run if node.name in needed] if any(n.name in program.differentiable for n in run) else []


def _without(instructions: Sequence[Instruction], kept: frozenset[str]) -> list[Instruction]:
    """The instructions, which do not free what is kept."""
    made: list[Instruction] = []
    for instruction in instructions:
        if isinstance(instruction, Free):
            instruction = Free(tuple(name for name in instruction.names if name not in kept))
            if not instruction.names:
                continue
        made.append(instruction)
    return made


class _Block:
    """One segment: what enters it, and the instructions that make it again."""

    def __init__(self, program: Program, nodes: Sequence[Node]) -> None:
        self.program, self.nodes = program, {node.name: node for node in nodes}
        feeds = [name for node in nodes for name in program.feeds[node.name]]
        self.fetches: dict[str, Fetch] = {name: program.fetches[name] for name in feeds if name in program.fetches}
        read = [self.fetches[name].value if name in self.fetches else name for name in feeds]
        outside = program.graph.replicated | set(self.nodes)
        self.enters = tuple(dict.fromkeys(name for name in read if name not in outside))
        self.done = False

    def instructions(self) -> list[Instruction]:
        """Those of the forward pass that belong to the segment; every value is freed after its last reader."""
        chosen = [instruction for instruction in self.program.forward if self._belongs(instruction)]
        last = {name: position for position, instruction in enumerate(chosen) for name in self._touched(instruction)}
        made: list[Instruction] = [Again(tuple(self.nodes))]
        for position, instruction in enumerate(chosen):
            made.append(instruction)
            gone = tuple(name for name, end in last.items() if end == position)
            if gone:
                made.append(Free(gone))
        return [*made, Once()]

    def _belongs(self, instruction: Instruction) -> bool:
        if isinstance(instruction, Start | Wait):
            return instruction.fetch in self.fetches
        return isinstance(instruction, Compute | Reduce) and instruction.node in self.nodes

    def _touched(self, instruction: Instruction) -> list[str]:
        """What the instruction makes or reads and is not there before and after the block."""
        names: Sequence[str] = ()
        if isinstance(instruction, Start | Wait):
            names = (instruction.fetch, self.fetches[instruction.fetch].value)
        elif isinstance(instruction, Compute | Reduce):
            names = (instruction.node, *self.program.feeds[instruction.node])
        return [name for name in names if name in self.nodes or name in self.fetches]
