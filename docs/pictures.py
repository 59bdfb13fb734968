"""Draws reach.svg and joint_hit.svg.

python docs/pictures.py FOLDER
"""

import sys
from pathlib import Path

INK, MISSING, HELD, HIT, SINK = "#111111", "#eeeeee", "#4c78a8", "#54a24b", "#f58518"


def text(x, y, words, anchor="start", size=13, weight="normal"):
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">'
        f"{words}</text>"
    )


def box(x, y, width, height, colour, opacity=0.8):
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}"'
        f' fill-opacity="{opacity}" stroke="#888888" stroke-width="0.5"/>'
    )


def svg(width, height, title, parts):
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' font-family="sans-serif" fill="{INK}">'
    )
    yield f"<title>{title}</title>"
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    yield from parts
    yield "</svg>"


# ---- what each kind needs ------------------------------------------------------------------------

TOKENS = 23  # computed; the next is token 23
PAGE = 4
KINDS = [  # name, head, tail_begin
    ("full", 0, 0),
    ("window of 8", 0, TOKENS - 7),
    ("sinks 2, window 8", 2, TOKENS - 7),
    ("chunk of 12", 0, TOKENS // 12 * 12),
    ("state", 0, TOKENS - 1),
    ("scratch", 0, TOKENS),
]


def reach():
    left, step = 160, 26
    yield text(
        left, 22, f"with {TOKENS} tokens computed, what is needed to compute the next?", size=14
    )
    y = 44
    for name, head, tail in KINDS:
        yield text(10, y + 17, name, weight="bold")
        for token in range(TOKENS):
            needed = token < head or token >= tail
            colour = SINK if token < head else HELD
            yield box(left + token * step, y, step - 3, 24, colour if needed else MISSING)
        for page in range(TOKENS // PAGE + 1):
            tokens = range(page * PAGE, page * PAGE + PAGE)
            held = name != "scratch" and (
                any(t < head or tail <= t < TOKENS for t in tokens) or TOKENS in tokens
            )
            width = PAGE * step - 5
            yield box(left + page * PAGE * step + 1, y + 28, width, 7, HELD if held else MISSING, 1)
        y += 56
    yield text(
        left, y + 6, "boxes: tokens; bars below: the pages of 4 tokens that are held", size=12
    )


# ---- the joint hit -------------------------------------------------------------------------------

ROWS = [  # what is still there, page by page, and a rule for the deepest boundary of each
    ("full", [1, 1, 1, 1, 1, 1, 0, 0]),
    ("window of 2 pages", [0, 0, 0, 1, 1, 1, 1, 1]),
    ("state", [0, 1, 0, 0, 1, 0, 0, 1]),
]


def can_resume(name, held, n):
    if name == "full":
        return all(held[:n])
    if name == "state":
        return bool(held[n - 1])
    return all(held[max(0, n - 2) : n])


def joint_hit():
    left, step = 170, 72
    pages = len(ROWS[0][1])
    yield text(left, 22, "a prompt of 8 pages that was seen before; what is still there", size=14)
    y = 40
    hits = []
    for name, held in ROWS:
        own = max(n for n in range(pages + 1) if n == 0 or can_resume(name, held, n))
        hits.append(own)
        yield text(10, y + 20, name, weight="bold")
        for page, there in enumerate(held):
            yield box(left + page * step, y, step - 4, 30, HELD if there else MISSING)
        yield text(left + pages * step + 8, y + 20, f"alone: {own} pages", size=12)
        y += 46
    joint = max(
        n
        for n in range(pages + 1)
        if n == 0 or all(can_resume(name, held, n) for name, held in ROWS)
    )
    x = left + joint * step - 2
    line = f'stroke="{HIT}" stroke-width="3" stroke-dasharray="6 3"'
    yield f'<path d="M{x},34 V{y}" {line} fill="none"/>'
    yield text(x, y + 18, f"joint hit: {joint} pages", "middle", 13, "bold")
    yield text(
        10, y + 44, "each leaf holds its own reach there, and nowhere deeper do all", size=12
    )


def main(folder: Path) -> None:
    title = "Which tokens each kind of leaf needs"
    (folder / "reach.svg").write_text("\n".join(svg(780, 400, title, reach())) + "\n")
    title = "The deepest boundary that every leaf can resume"
    (folder / "joint_hit.svg").write_text("\n".join(svg(860, 240, title, joint_hit())) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
