"""Writes the tables of `benchmarks.md` from what `halocline bench` measured; what is between them is written by hand.

halocline bench micro --json > micro.json
halocline bench peers --json > peers.json
halocline bench fidelity --json > fidelity.json
python docs/list_benchmarks.py micro.json peers.json fidelity.json
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "benchmarks.md"


def races(document: dict[str, Any]) -> str:
    """A table for each layer or net: every side with its step, spread, ratio and what its time is spent on."""
    machine = document["machine"]
    lines = [f"On {machine['cores']} cores of an {machine['cpu']}, torch {machine['torch']}.", ""]
    for name, found in document["workloads"].items():
        lines += [
            f"**{name}** ({found['workload']})",
            "",
            "| side | step, ms | spread | ratio |",
            "|---|---:|---:|---:|",
        ]
        for side in found["sides"]:
            ratio = f"{side['ratio']:.2f}" if side["ratio"] else ""
            lines.append(f"| {side['name']} | {1e3 * side['median_s']:.2f} | ±{side['spread']:.0%} | {ratio} |")
        for side in found["sides"]:
            if side.get("spent_s"):
                whole = sum(side["spent_s"].values())
                shares = (f"{what} {s / whole:.1%}" for what, s in side["spent_s"].items() if s > 0.004 * whole)
                lines += ["", f"{side['name']} spends its step on: {', '.join(shares)}."]
        lines.append("")
    return "\n".join(lines)


def fidelity(document: dict[str, Any]) -> str:
    """A table of all nets and plans, measured and predicted, and the summary."""
    lines = ["| net | plan | ranks | step, ms | predicted | error | memory, MB | predicted | error |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for row in document["rows"]:
        times = f"{1e3 * row['measured_s']:.1f} | {1e3 * row['predicted_s']:.1f} | {row['error']:+.0%}"
        memory = f"{row['measured_bytes'] / 1e6:.1f} | {row['predicted_bytes'] / 1e6:.1f} | {row['memory_error']:+.0%}"
        lines.append(f"| {row['net']} | {row['plan']} | {row['ranks']} | {times} | {memory} |")
    found = document["summary"]
    lines += ["", f"{found['pairs']} pairs. Error of the step time: {found['median_error']:.1%} in the median, "
              f"{found['worst_error']:.1%} at worst; of the peak memory {found['worst_memory_error']:.1%} at worst. "
              f"Among the plans of a net, the one predicted best is within {found['worst_choice']:.1%} of the one "
              "measured best."]  # fmt: skip
    return "\n".join(lines)


def main(*files: str) -> None:
    text = PAGE.read_text()
    for file in files:
        document = json.loads(Path(file).read_text())
        kind = document.get("kind", "fidelity")
        made = fidelity(document) if kind == "fidelity" else races(document)
        found = re.search(rf"(<!-- {kind} -->\n).*?(<!-- end -->)", text, re.DOTALL)
        if found is None:
            raise SystemExit(f"{PAGE}: there is no place for {kind}: expected <!-- {kind} --> and <!-- end -->")
        text = text[: found.end(1)] + made.rstrip() + "\n" + text[found.start(2) :]
    PAGE.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
