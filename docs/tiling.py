"""Draws docs/tiling.svg, the picture in the README: `python docs/tiling.py > docs/tiling.svg`.

The numbers are those of the README's example: 4 full-attention, 12 window and 12 recurrent layers,
pages of 16 tokens, 1 GiB. The README's Python example prints them, so the tests hold them.
"""

WIDTH, LEFT, RIGHT = 960, 150, 940
COLOURS = {"full": "#4c78a8", "window": "#59a14f", "state": "#f28e2b", "empty": "#ffffff"}
HUGE_BYTES = 7_077_888
LEAVES = [  # name, blocks per huge block, bytes of a page, what a block holds
    ("full", 27, 262_144, "16 tokens of 4 layers, 256 KiB"),
    ("window", 9, 786_432, "16 tokens of 12 layers, 768 KiB"),
    ("state", 1, 6_733_824, "one state of 12 layers, 6.42 MiB"),
]
OWNERS = ["full", "full", "window", "state", "full", "empty", "state", "window", "empty", "full"]


def rect(x, y, width, height, fill, **more):
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{fill}"'
        f' stroke="#333333"{extra}/>'
    )


def text(x, y, words, anchor="start", size=13, weight="normal"):
    return (
        f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-size="{size}"'
        f' font-weight="{weight}">{words}</text>'
    )


def arena(y):
    """The strip of huge blocks, coloured by the leaf that each one serves now."""
    yield text(10, y + 25, "the arena", weight="bold")
    null, gap = 50, 4
    width = (RIGHT - LEFT - null) / len(OWNERS)
    yield rect(LEFT, y, null - gap, 40, "#dddddd")
    yield text(LEFT + (null - gap) / 2, y + 24, "null", "middle", 12)
    for index, owner in enumerate(OWNERS):
        x = LEFT + null + index * width
        yield rect(x, y, width - gap, 40, COLOURS[owner], fill_opacity="0.75")
        yield text(x + (width - gap) / 2, y + 24, owner, "middle", 12)


def tilings(y):
    """One huge block, once per leaf, to scale."""
    for name, ratio, page_bytes, holds in LEAVES:
        yield text(10, y + 18, f"as {name}", weight="bold")
        yield text(10, y + 36, f"{ratio} block{'s' * (ratio > 1)}", size=12)
        stride = (RIGHT - LEFT) / ratio
        data = stride * page_bytes * ratio / HUGE_BYTES
        for block in range(ratio):
            x = LEFT + block * stride
            if data < stride - 1:
                yield rect(x + data, y, stride - data, 44, "url(#padding)")
            yield rect(x, y, data, 44, COLOURS[name], fill_opacity="0.75")
        yield text(LEFT, y + 62, f"each block: {holds}", size=12)
        if data < stride - 1:
            yield text(RIGHT, y + 62, f"padding: {100 * (stride / data - 1):.1f} %", "end", 12)
        y += 84


def picture():
    chosen = 4
    width = (RIGHT - LEFT - 50) / len(OWNERS)
    x = LEFT + 50 + chosen * width
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 380"'
        ' font-family="sans-serif" fill="#111111">'
    )
    yield "<title>An arena of huge blocks, and one huge block tiled by three leaves</title>"
    yield (
        '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse">'
        '<path d="M0,6 L6,0" stroke="#888888"/></pattern></defs>'
    )
    yield f'<rect width="{WIDTH}" height="380" fill="#ffffff"/>'
    yield from arena(16)
    yield (
        f'<path d="M{x:.1f},56 L{LEFT},112 M{x + width - 4:.1f},56 L{RIGHT},112"'
        ' stroke="#888888" stroke-dasharray="4 3" fill="none"/>'
    )
    yield text((LEFT + RIGHT) / 2, 100, "any huge block, 6.75 MiB", "middle", 13, "bold")
    yield from tilings(112)
    yield "</svg>"


if __name__ == "__main__":
    print("\n".join(picture()))
