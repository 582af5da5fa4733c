# SPDX-License-Identifier: Apache-2.0
"""Write the generated parts of ``docs/``: the table of flags and the figure.

python tools/docs.py [--check]
"""

import argparse
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"

FLAGS_HEAD = """\
# Flags

<!-- Written by tools/docs.py from the FLAGS table in vllm/plugins/b12x_mla_sparse.py. -->

| variable | accepted | default | meaning |
|---|---|---|---|
"""

FLAGS_TAIL = """
Any other value stops vLLM at start with an error that names the variable, the value and what is
accepted. Every rank has to start with the same values; they are compared before the first
collective.

What vLLM itself has to be told:

| argument | value | why |
|---|---|---|
| `--attention-backend` | `B12X_MLA_SPARSE` | vLLM does not choose it by itself |
| `--kv-cache-dtype` | `fp8_ds_mla` | `auto` and `fp8` become another record format |
| `--decode-context-parallel-size` | 2 or more | otherwise every rank has all records already |
| `--cp-kv-cache-interleave-size` | a multiple of 4 | vLLM's default of 1 would split index pools |
| `--block-size` | left out, or a multiple of 256 | index pages hold 64 pools of 4 tokens |

`VLLM_PLUGINS`, if it is set, has to name `b12x_mla_sparse`.
"""


def flags_page() -> str:
    """``docs/flags.md``."""
    from vllm.plugins.b12x_mla_sparse import FLAGS

    rows = []
    for flag in FLAGS:
        default = flag.default
        shown = "unset" if default is None else int(default) if default in (0, 1) else default
        rows.append(f"| `{flag.name}` | {flag.accepted} | {shown} | {flag.meaning} |\n")
    return FLAGS_HEAD + "".join(rows) + FLAGS_TAIL


COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
RANKS, CELLS, CELL = 4, 8, 14
INK, PALE = "#333", "#f4f4f4"


class Drawing:
    """An SVG that is put together piece by piece."""

    def __init__(self, width: int, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
            f'markerHeight="6" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/>'
            "</marker></defs>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def text(self, x: float, y: float, words: str, *, size: int = 12, bold: bool = False) -> None:
        """Words centred at ``x``."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="middle" font-size="{size}" '
            f'fill="{INK}"{weight}>{words}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled rectangle with an outline."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
            f'stroke="{INK}" stroke-width="0.7"/>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, width: float) -> None:
        """A straight arrow."""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{INK}" '
            f'stroke-opacity="0.55" stroke-width="{width:g}" marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        """The document."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def _row_of_ranks(d: Drawing, left: float, y: float, owned: bool) -> list[float]:
    """Four ranks with the records they hold (own ones, or all); returns their centres."""
    centres = []
    for rank in range(RANKS):
        x = left + rank * (CELLS * CELL / 2 + 74)
        d.box(x - 6, y - 6, 4 * CELL + 12, 2 * CELL + 12, PALE)
        for cell in range(CELLS):
            owner = cell % RANKS
            fill = COLOURS[owner] if not owned or owner == rank else "white"
            d.box(x + cell % 4 * CELL, y + cell // 4 * CELL, CELL, CELL, fill)
        centres.append(x + 2 * CELL)
        d.text(centres[-1], y - 12, f"rank {rank}", size=11)
    return centres


def _exchange(d: Drawing, centres: list[float], y: float, height: float, width: float) -> None:
    for start in centres:
        for end in centres:
            if start != end:
                d.arrow(start, y, end, y + height, width)


def figure() -> str:
    """``docs/figures/gather.svg``: both paths, four ranks."""
    d = Drawing(1120, 430)
    for left, title in ((50, "ordinary DCP prefill"), (620, "full-CKV prefill")):
        d.text(left + 222, 26, title, size=16, bold=True)
    d.parts.append(
        f'<line x1="560" y1="14" x2="560" y2="416" stroke="{INK}" stroke-dasharray="3"/>'
    )

    centres = _row_of_ranks(d, 50, 64, owned=True)
    _exchange(d, centres, 104, 46, 3)
    d.text(272, 172, "all-gather the queries of all heads: 16 KiB per query and rank")
    d.text(
        272, 200, "each rank selects and attends in its own quarter, for all 64 heads", bold=True
    )
    d.text(272, 228, "all-gather pool candidates: 4 KiB per query and rank")
    _exchange(d, centres, 240, 46, 3)
    d.text(272, 308, "merge four partial outputs by log-sum-exp: 16 KiB per query and rank")
    for centre in centres:
        d.box(centre - 34, 330, 68, 26, PALE)
        d.text(centre, 347, "16 heads", size=11)
    d.text(272, 396, "grows with queries x heads")

    centres = _row_of_ranks(d, 620, 64, owned=True)
    _exchange(d, centres, 104, 46, 0.8)
    d.text(842, 172, "all-gather records and index keys: 561 bytes per visible token")
    centres = _row_of_ranks(d, 620, 212, owned=False)
    d.text(842, 276, "each rank selects and attends in the whole context,", bold=True)
    d.text(842, 294, "for its own 16 heads", bold=True)
    for centre in centres:
        d.arrow(centre, 302, centre, 326, 1.2)
        d.box(centre - 34, 330, 68, 26, PALE)
        d.text(centre, 347, "16 heads", size=11)
    d.text(842, 396, "grows with context; no query gather, no merge")
    return d.svg()


def main() -> int:
    """Write both files, or with ``--check`` say which one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if stale")
    check = parser.parse_args().check
    stale = False
    for path, text in ((DOCS / "flags.md", flags_page()), (DOCS / "figures/gather.svg", figure())):
        if not path.exists() or path.read_text() != text:
            stale = True
            print(f"{path.relative_to(DOCS.parent)} is {'out of date' if check else 'written'}")
            if not check:
                path.write_text(text)
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
