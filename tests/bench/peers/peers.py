"""`./dev bench peers`: kvleaf beside other cache managers; see README.md in this folder.

    python peers.py BENCH_FOLDER [--workload NAME]... [--peer NAME=PYTHON]... [--json FILE]

BENCH_FOLDER holds the built benchmarks. A peer whose Python is given is measured now, by its
driver; of the others the recorded figures are shown. Exit code 1 if something that ran failed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS = [
    "llama-3.1-70b",
    "gemma-3-27b",
    "gpt-oss-20b",
    "qwen3-next-80b-a3b",
    "nemotron-3-nano-30b-a3b",
]
TRACES = ["mooncake_conversation", "rtp_llm_online", "agent_sessions"]
BENCHES = {  # workload: executables
    "draw": ["bench_draw"],
    "prompt": ["bench_prompt", "bench_models"],
    "decode": ["bench_models"],
    "replay": ["bench_models"],
    "capacity": ["bench_capacity"],
}
DRIVERS = {  # peer: (workloads, models, arguments of every run)
    "max": (["draw", "prompt", "decode", "replay", "capacity"], MODELS[:4], ["--page", "16"]),
    "vllm": (["draw", "prompt", "decode", "replay", "capacity"], MODELS, ["--page", "16"]),
    "sglang": (["draw", "prompt", "replay"], MODELS[:1], ["--page", "16"]),
}


def run(command: list[str]) -> tuple[list[dict], bool]:
    """The records a program prints, and whether it succeeded."""
    print("peers: " + " ".join(str(part) for part in command), file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    records = []
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            records.append(json.loads(line))
    if done.returncode:
        print(f"peers: {command[0]} failed with {done.returncode}", file=sys.stderr)
    return records, done.returncode == 0


def measure_ours(folder: Path, workloads: list[str]) -> tuple[list[dict], bool]:
    records, good = [], True
    for workload in workloads:
        for bench in BENCHES[workload]:
            program = folder / bench
            if not program.exists():
                print(f"peers: {bench} was not built; {workload} goes without it", file=sys.stderr)
                continue
            # Medians, as the drivers' figures are.
            more, fine = run([str(program), "--workload", workload, "--median"])
            records += more
            good = good and fine
    return records, good


def measure_peer(name: str, python: str, workloads: list[str]) -> tuple[list[dict], bool]:
    known, models, arguments = DRIVERS[name]
    records, good = [], True
    for workload in workloads:
        if workload not in known:
            continue
        for model in models[:1] if workload == "draw" else models:
            command = [python, str(HERE / f"{name}_driver.py"), "--workload", workload]
            command += ["--model", model, *arguments]
            traces = TRACES if workload == "replay" else [None]
            for trace in traces:
                more, fine = run(command + (["--trace", trace] if trace else []))
                records += more
                good = good and fine
    return records, good


def row_of(record: dict) -> tuple | None:
    """Which line of the table a record belongs to; None for what the table does not show."""
    case, metric = record["case"], record["metric"]
    model = next((m for m in MODELS if m in case), None)
    if metric in ("pair_ns", "pair_ns_batch64"):
        if "1000000" in case:
            return None
        if "16 and 1 pages" in case:  # no peer has such a pool
            return ("draw, 1,000 held, 16 to a huge block", "", metric)
        return ("draw, 1,000 held", "", metric)
    if metric == "hash_us":
        return ("prompt, P=16", "sha256" if "sha256" in case else "fast hash", metric)
    if model is None:
        return None
    if metric in ("cold_us", "warm_us"):
        return ("prompt, 131,072 tokens", model, metric)
    if metric == "step_us_median":
        length = next((n for n in (1024, 8192, 32768) if f"L={n} " in case), None)
        return (f"decode, 256 requests of {length:,}", model, metric) if length else None
    if metric in ("hit_tokens_pct", "us_per_request"):
        trace = next((t for t in TRACES if t in case), None)
        budget = "256 GiB" if "256 GiB" in case else "64 GiB"
        return (f"replay {trace}, {budget}", model, metric) if trace else None
    if metric == "requests":
        caching = "off" if "caching off" in case else "on"
        return (f"capacity, prefix caching {caching}", model, metric)
    return None


def best(records: list[dict]) -> dict:
    """Of several records in one place (MAX's chunks, vLLM's retentions): the better one."""
    values = [r for r in records if r["value"] is not None]
    if not values:
        return records[0]
    higher = records[0]["unit"] not in ("ns", "us", "ms")
    return (max if higher else min)(values, key=lambda r: r["value"])


def text_of(record: dict | None) -> str:
    if record is None:
        return ""
    if record["value"] is None:
        return "none"
    value = record["value"]
    if record["unit"] == "requests":
        return f"{value:,.0f}"
    return f"{value:,.2f}" if record["unit"] == "%" else f"{value:,.1f}"


def table(records: list[dict], measured: set[str]) -> str:
    cells: dict[tuple, dict[str, list[dict]]] = {}
    for record in records:
        row = row_of(record)
        if row is not None:
            peer = record["system"].split()[0]
            cells.setdefault(row, {}).setdefault(peer, []).append(record)
    names = {r["system"].split()[0]: r["system"] for r in records}
    peers = ["kvleaf", *(p for p in DRIVERS if p in names)]
    heads = [names.get(p, p) + ("" if p in measured else " (recorded)") for p in peers]
    lines = ["| workload | model | metric | " + " | ".join(heads) + " |"]
    lines.append("| --- | --- | --- |" + " ---: |" * len(peers))
    for row, by_peer in cells.items():
        found = [best(by_peer[p]) if p in by_peer else None for p in peers]
        lines.append("| " + " | ".join([*row, *map(text_of, found)]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench peers", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--workload", action="append", choices=list(BENCHES), default=None)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--json", type=Path, help="write every record here, one a line")
    args = parser.parse_args()
    workloads = args.workload or list(BENCHES)
    pythons = {}
    for peer in args.peer:
        name, _, python = peer.partition("=")
        if name not in DRIVERS or not python:
            parser.error(f"--peer {peer}: NAME=PYTHON with one of {', '.join(DRIVERS)} is accepted")
        pythons[name] = python

    records, good = measure_ours(args.folder, workloads)
    measured = {"kvleaf"}
    for name, python in pythons.items():
        more, fine = measure_peer(name, python, workloads)
        good = good and fine
        if more:
            records += more
            measured.add(name)
    for line in (HERE / "figures.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["workload"] in workloads and record["system"].split()[0] not in measured:
            records.append(record)
    if args.json:
        args.json.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(table(records, measured))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
