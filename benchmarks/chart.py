"""Draws the chart of README.md from the figures in docs/log.md: `python -m benchmarks.chart`.

It measures nothing. `python -m benchmarks.peers` measured the figures; a test compares the chart with the log.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

CHART = ROOT / "docs" / "benchmarks" / "peers.svg"
# Rows of the log's table, and their titles in the chart.
ROWS = {
    "decode, 1 sequence": "1 answer at a time",
    "decode, 8": "8 answers at once",
    "decode, 32": "32 answers at once",
    "prefill, 512": "a prompt of 512 tokens",
}
BARS = (("Polyhead int8", "#2f6fd0"), ("OpenVINO GenAI", "#8a8f98"), ("llama.cpp", "#b5813c"))
ROW = re.compile(r"^\| ([^|]+) \| [\d,]+ \| ([^|]+) \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
WIDTH, LEFT, BAR, GAP, PANEL = 760, 150, 16, 4, 96


def read_figures(log: str) -> dict[str, tuple[float, ...]]:
    """Tokens per second of Polyhead, OpenVINO GenAI and llama.cpp, by row. Of a range the middle is taken."""
    start = log.index("| | old int8 | new int8 |")
    found = {}
    for title, *cells in ROW.findall(log[start : log.index("\n\n", start)]):
        found[title] = tuple(map(middle, cells))
    return {title: found[title] for title in ROWS}


def middle(cell: str) -> float:
    numbers = [float(number.replace(",", "")) for number in cell.split(" to ")]
    return sum(numbers) / len(numbers)


def draw(figures: dict[str, tuple[float, ...]]) -> str:
    """An SVG with a panel for each row; each panel has a scale of its own."""
    height = 34 + PANEL * len(figures)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13" role="img">',
        "<title>Tokens per second of SmolLM2-135M Q8_0 on two cores</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="20" fill="#1f2328" font-weight="bold">Tokens per second, SmolLM2-135M Q8_0, two cores</text>',
    ]
    for panel, (row, values) in enumerate(figures.items()):
        top = 46 + panel * PANEL
        parts.append(f'<text x="12" y="{top}" fill="#1f2328">{ROWS[row]}</text>')
        for bar, ((name, colour), value) in enumerate(zip(BARS, values, strict=True)):
            y = top + 8 + bar * (BAR + GAP)
            length = value / max(values) * (WIDTH - LEFT - 80)
            parts += [
                f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end" fill="#59636e">{name}</text>',
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>',
                f'<text x="{LEFT + length + 6:.1f}" y="{y + 13}" fill="#1f2328">{value:,.0f}</text>',
            ]
    return "\n".join([*parts, "</svg>", ""])


def main(log: Path = ROOT / "docs" / "log.md", chart: Path = CHART) -> None:
    chart.parent.mkdir(exist_ok=True)
    chart.write_text(draw(read_figures(log.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
