"""What each rule of retention reuses of the traces: measured, and shown in docs/retention.md.

    ./dev run -- python3 tests/bench/retention.py measure [--budgets 64] [--models A,B]
                                                          [--traces A,B] [--retention A,B]
    python3 tests/bench/retention.py page [--check]

`measure` runs `kvleaf replay` for what has no record in retention.jsonl yet (remove a line to
measure it again), one at a time, each seconds to minutes. `page` writes the tables of the records
into the page, or checks that they are there.
"""

import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RECORDS = ROOT / "tests/bench/retention.jsonl"
PAGE = ROOT / "docs/retention.md"
MODELS = (
    "llama-3.1-70b",
    "gemma-3-27b",
    "gpt-oss-20b",
    "qwen3-next-80b-a3b",
    "nemotron-3-nano-30b-a3b",
)
TRACES = ("mooncake_conversation", "mooncake_synthetic", "rtp_llm_online", "agent_sessions")
RETENTION = ("tail", "spaced", "2048", "dense")
KEY = ("gib", "model", "trace", "retention")


def record_of(report):
    """What is kept of `kvleaf replay --json --bound`: percent of prompt tokens."""
    prompt = report["prompt_tokens"]
    return {
        "gib": report["budget_bytes"] >> 30,
        "model": pathlib.Path(report["model"]).stem,
        "trace": pathlib.Path(report["trace"]).name.split(".")[0],
        "retention": report["retention"],
        "hit_pct": round(report["hit_pct"], 2),
        "lost_pct": {
            group: round(100 * counts["lost_tokens"] / prompt, 2)
            for group, counts in report["groups"].items()
        },
        "refused": report["refused"],
        "lru_pct": round(report["bound"]["lru_hit_pct"], 2),
        "optimum_pct": round(report["bound"]["optimum_hit_pct"], 2),
    }


def key_of(record):
    return tuple(record[name] for name in KEY)


def records():
    return [json.loads(line) for line in RECORDS.read_text().splitlines()]


def order(record):
    return (
        record["gib"],
        TRACES.index(record["trace"]),
        MODELS.index(record["model"]),
        RETENTION.index(record["retention"]),
    )


def write(found):
    RECORDS.write_text("".join(json.dumps(r) + "\n" for r in sorted(found, key=order)))


def measure(arguments):
    found = records() if RECORDS.exists() else []
    have = {key_of(record) for record in found}
    wanted = [
        (gib, model, trace, retention)
        for gib in map(int, arguments.budgets.split(","))
        for trace in arguments.traces.split(",")
        for model in arguments.models.split(",")
        for retention in arguments.retention.split(",")
    ]
    for gib, model, trace, retention in wanted:
        if (gib, model, trace, retention) in have:
            continue
        command = ["kvleaf", "replay", ROOT / f"tests/data/traces/{trace}.jsonl.gz"]
        command += ["--model", ROOT / f"tests/data/models/{model}.json", "--budget", f"{gib}GiB"]
        command += ["--retention", retention, "--bound", "--json"]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        found.append(record_of(report))
        print(json.dumps(found[-1]), file=sys.stderr)
        write(found)


def losses(record):
    lost = [f"{group} {percent:.2f}" for group, percent in record["lost_pct"].items() if percent]
    return ", ".join(lost)


def tables():
    """Markdown: a table for each budget."""
    text = ""
    found = records()
    for gib in sorted({record["gib"] for record in found}):
        rows = {}
        for record in sorted((r for r in found if r["gib"] == gib), key=order):
            rows.setdefault((record["trace"], record["model"]), {})[record["retention"]] = record
        rules = [rule for rule in RETENTION if any(rule in row for row in rows.values())]
        text += f"\n### {gib} GiB\n\n| trace | model | LRU, optimum |"
        text += "".join(f" {rule} |" for rule in rules) + " lost by `tail` to |\n"
        text += "|---|---|---|" + "---|" * len(rules) + "---|\n"
        for (trace, model), row in rows.items():
            bounds = next(iter(row.values()))
            best = max(record["hit_pct"] for record in row.values())
            cells = []
            for rule in rules:
                hit = row[rule]["hit_pct"] if rule in row else None
                bold = "**" if hit == best and len(row) > 1 else ""
                cells.append("" if hit is None else f"{bold}{hit:.2f}{bold}")
            lost = losses(row["tail"]) if "tail" in row else ""
            text += f"| {trace} | {model} | {bounds['lru_pct']:.2f}, {bounds['optimum_pct']:.2f} | "
            text += " | ".join(cells) + f" | {lost} |\n"
    return text


def page(arguments):
    text = PAGE.read_text()
    begin, end = "<!-- tables: begin -->\n", "<!-- tables: end -->"
    before, rest = text.split(begin)
    wanted = before + begin + tables() + "\n" + end + rest.split(end)[1]
    if not arguments.check:
        PAGE.write_text(wanted)
    elif text != wanted:
        sys.exit(f"{PAGE}: not the tables of {RECORDS}; `retention.py page` writes them")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--budgets", default="64", help="GiB")
    measuring.add_argument("--models", default=",".join(MODELS))
    measuring.add_argument("--traces", default=",".join(TRACES))
    measuring.add_argument("--retention", default=",".join(RETENTION))
    measuring.set_defaults(run=measure)
    paging = commands.add_parser("page")
    paging.add_argument("--check", action="store_true")
    paging.set_defaults(run=page)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
