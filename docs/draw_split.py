"""Draws `split.svg`: a sample split over four ranks, and what one of them holds for a convolution.

`python docs/draw_split.py` writes it anew. Regions and messages are those that halocline computes.
"""

from pathlib import Path

from halocline.layout import Layout
from halocline.mesh import Mesh
from halocline.ops.window import Window
from halocline.region import Region
from halocline.transfer import Transfer

ROWS, COLUMNS, KERNEL, PADDING = 11, 13, 5, 2
RANK = 0
CELL, TOP = 22, 64
COLOURS = ("#4c78a8", "#f2a541", "#59a27a", "#b56576")
INK = "#30343b"


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start", colour: str = INK) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" '
        f'font-family="DejaVu Sans, Verdana, sans-serif">{words}</text>'
    )


def cells(region: Region, left: float, colour: str, opacity: float) -> list[str]:
    (h0, h1), (w0, w1) = region.intervals
    return [
        f'<rect x="{left + w * CELL:g}" y="{TOP + h * CELL:g}" width="{CELL - 1}" height="{CELL - 1}" '
        f'fill="{colour}" fill-opacity="{opacity:g}"/>'
        for h in range(h0, h1)
        for w in range(w0, w1)
    ]


def frame(region: Region, left: float, colour: str, dashes: str = "") -> str:
    (h0, h1), (w0, w1) = region.intervals
    style = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<rect x="{left + w0 * CELL - 1.5:g}" y="{TOP + h0 * CELL - 1.5:g}" width="{(w1 - w0) * CELL + 2:g}" '
        f'height="{(h1 - h0) * CELL + 2:g}" fill="none" stroke="{colour}" stroke-width="2.5"{style}/>'
    )


def draw() -> str:
    mesh = Mesh((("y", 2), ("x", 2)))
    owns = Layout.split(mesh, (ROWS, COLUMNS), {0: ("y",), 1: ("x",)})
    windows = Window(KERNEL, 1, PADDING, 1, ROWS), Window(KERNEL, 1, PADDING, 1, COLUMNS)
    needs = tuple(
        Region(tuple(window.reads(part) for window, part in zip(windows, owns.region(rank).intervals)))
        for rank in range(mesh.size)
    )
    route = Transfer(owns, needs, frozenset(mesh.names)).route(RANK)
    left, right = 24, 24 + (COLUMNS + 3) * CELL
    legend = right + (COLUMNS - 2) * CELL
    shapes: list[str] = []
    for rank in range(mesh.size):
        shapes += cells(owns.region(rank), left, COLOURS[rank], 0.55 if rank == RANK else 0.3)
        (h0, h1), (w0, w1) = owns.region(rank).intervals
        h0, w0 = (h0 and h0 + PADDING), (w0 and w0 + PADDING)  # beside the dashed lines
        middle = left + (w0 + w1) / 2 * CELL, TOP + (h0 + h1) / 2 * CELL + 5
        shapes.append(text(*middle, f"rank {rank}", 14, "middle"))
    for peer, boxes in route.recvs:
        for box in boxes:
            shapes.append(frame(box, left, COLOURS[peer], "5 3"))
            shapes += cells(box, right, COLOURS[peer], 0.45)
            shapes.append(frame(box, right, COLOURS[peer], "5 3"))
    own = owns.region(RANK)
    shapes += cells(own, right, COLOURS[RANK], 0.55)
    shapes += [frame(own, left, COLOURS[RANK]), frame(own, right, COLOURS[RANK])]
    (_, h1), (_, w1) = own.intervals
    shapes.append(text(right + w1 / 2 * CELL, TOP + h1 / 2 * CELL + 5, "its block", 14, "middle"))
    shapes.append(text(left, 28, f"A sample of {ROWS} x {COLUMNS} cells, split over 4 ranks", 15))
    shapes.append(text(left, 48, "each rank owns one region, of every tensor in the net", 12))
    shapes.append(text(right, 28, f"What rank {RANK} reads for a {KERNEL} x {KERNEL} convolution", 15))
    shapes.append(text(right, 48, "its block and the halo; what overhangs the sample is padding", 12))
    lines = [(COLOURS[RANK], f"owns {own}")]
    lines += [(COLOURS[peer], f"{box} from rank {peer}") for peer, boxes in route.recvs for box in boxes]
    for number, (colour, words) in enumerate(lines):
        y = TOP + 30 + 26 * number
        shapes.append(f'<rect x="{legend}" y="{y - 12}" width="14" height="14" fill="{colour}" fill-opacity="0.6"/>')
        shapes.append(text(legend + 22, y, words, 13))
    y = TOP + 30 + 26 * len(lines) + 14
    shapes.append(text(legend, y, "Backward, the same messages run in", 12))
    shapes.append(text(legend, y + 17, "reverse, and what overlaps is added.", 12))
    width, height = legend + 250, TOP + ROWS * CELL + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    title = "<title>A sample split over four ranks, and the halo that one of them receives</title>"
    paper = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, title, paper, *shapes, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("split.svg").write_text(draw())
