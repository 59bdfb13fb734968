"""Replays a trace of operations through C, C++ and Python, and compares what they print (B-02).

replay.py SCRATCH PROGRAM_IN_C PROGRAM_IN_CPP [SEED]    see replay.h
"""

import random
import re
import subprocess
import sys
from pathlib import Path

import kvleaf

HEADER = (Path(__file__).parent / "replay.h").read_text(encoding="utf-8")
C: dict[str, int] = {}
for _name, _value, _shift in re.findall(r"replay_(\w+) = (\d+)(?: << (\d+))?", HEADER):
    C[_name] = int(_value) << int(_shift or 0)


def make_trace(seed: int, steps: int = 3000) -> list[str]:
    """Mostly what an engine would do: it knows what it asked for, not what it was granted."""
    rng = random.Random(seed)
    lines: list[str] = []
    live: dict[int, int] = {}  # id: tokens known, as far as it goes
    preempted: set[int] = set()
    ids = iter(range(1, 4096))
    in_flight = made = 0
    while made < steps:
        if len(live) < 7 and rng.random() < 0.4:
            request, count = next(ids), rng.randint(1, 60)
            fork = rng.choice([0, 8, 13, 24, 60])
            lines.append(f"admit {request} {1000 * rng.randint(0, 2)} {count} {fork}")
            live[request] = count
        if live:
            rows = rng.sample(sorted(live), rng.randint(1, len(live)))
            words = [f"{request} {rng.choice([1, 4, 7, 24])}" for request in rows]
            lines.append("step " + " ".join(words))
            made += 1
            in_flight += 1
            if in_flight == 2 or rng.random() < 0.6:
                lines += ["settle"] * rng.randint(1, in_flight)
                in_flight = 0 if lines[-2] == "settle" or in_flight == 1 else 1
            for request in rows:
                count = rng.randint(1, 5)
                if rng.random() < 0.5 and live[request] + count <= C["max_len"]:
                    lines.append(f"append {request} {rng.choice([7, 500])} {count}")
                    live[request] += count
        for request in sorted(live):
            chance = rng.random()
            if chance < 0.04 or live[request] > C["max_len"] - 6:
                lines.append(f"release {request} {rng.randint(0, 4) // 4 ^ 1}")
                del live[request]
                preempted.discard(request)
            elif chance < 0.05:
                lines.append(f"preempt {request}")
                preempted.add(request)
            elif chance < 0.20 and request in preempted:
                lines.append(f"resume {request}")
                preempted.discard(request)
            elif chance < 0.22 and len(live) < C["max_batch"]:
                live[child := next(ids)] = live[request]
                lines += ["settle", "settle", f"fork {request} {child}"]
            elif chance < 0.24:
                lines += ["settle", "settle", f"rewind {request} {rng.randint(1, live[request])}"]
        if rng.random() < 0.03:
            lines.append("abandon")
            in_flight = 0
    return lines


class Replay:
    def __init__(self):
        shape = dict(layers=2, kv_heads=1, head_dim=8, dtype="float32")
        page = C["page_tokens"]
        state = [kvleaf.Slab("s", (96,), "float32")]
        self.leaves = [
            kvleaf.FullAttentionLeaf("full", **shape, tokens_per_page=page),
            kvleaf.SlidingWindowLeaf("window", window=C["window"], **shape, tokens_per_page=page),
            kvleaf.RecurrentStateLeaf("state", layers=1, slabs=state, tokens_per_page=page),
        ]
        self.index = {leaf.leaf_id: i for i, leaf in enumerate(self.leaves)}
        self.manager = kvleaf.BlockManager(
            self.leaves, C["budget"], page_tokens=page, max_len=C["max_len"],
            max_step_tokens=C["max_step_tokens"])  # fmt: skip
        self.planner = kvleaf.StepPlanner(
            self.manager, max_batch=C["max_batch"], max_step_tokens=C["step_tokens"]
        )
        self.texts: dict[int, list[int]] = {}
        self.steps: list[int] = []

    def admit(self, request: int) -> str:
        answer = self.manager.admit(request, self.texts[request])
        lost = "".join(f" {group}={tokens}" for group, tokens in answer.lost.items())
        return (f"admit: hit {answer.hit_tokens} stop {answer.next_stop or 0} lost{lost} "
                f"because '{answer.reason}'")  # fmt: skip

    def step(self, *given: int) -> str | None:
        batch = []
        for request, most in zip(given[::2], given[1::2]):
            if request not in self.manager:
                continue
            left = self.manager.length(request) - self.manager.planned(request)
            if left:
                batch.append((request, min(most, left)))
        if not batch:
            return None
        plan = self.planner.plan(batch)
        self.steps.append(plan.step)
        words = [f"step {plan.step}: rows", *plan.rows, "refused", *plan.refused]
        words += ["lens", *plan.seq_lens]
        for leaf in self.leaves:
            key = "state_rows" if leaf.leaf_id == "state" else "block_table"
            words += [leaf.leaf_id, *plan.arrays[leaf.leaf_id][key].flatten()]
            words += ["slots", *plan.slot_mapping.get(leaf.leaf_id, [])]
        words += ["copies", *(f"{self.index[leaf]}:{a}>{b}" for leaf, a, b in plan.copies)]
        words += ["clears", *(f"{self.index[leaf]}:{block}" for leaf, block in plan.zero_fills)]
        return " ".join(map(str, words))

    def apply(self, operation: str, *given: int) -> str | None:
        manager = self.manager
        if operation == "admit":
            request, first, count, fork = given
            shift = C["fork_shift"]
            self.texts[request] = [first + i + (shift if i >= fork else 0) for i in range(count)]
            return self.admit(request)
        if operation == "resume":
            return self.admit(*given)
        if operation == "append":
            request, first, count = given
            manager.append(request, list(range(first, first + count)))
            self.texts[request] += range(first, first + count)
        elif operation == "step":
            return self.step(*given)
        elif operation in ("settle", "abandon"):
            if not self.steps:
                return None
            if operation == "abandon":
                lengths = self.planner.abandon(self.steps[0])
                self.steps.clear()
                return "abandon" + "".join(f" {request}={n}" for request, n in lengths.items())
            self.planner.settle(self.steps[0])
            del self.steps[0]
        elif operation == "fork":
            self.texts[given[1]] = list(self.texts[given[0]])
            manager.fork(*given)
        elif operation == "rewind":
            manager.rewind(*given)
            del self.texts[given[0]][given[1] :]
        elif operation == "preempt":
            manager.preempt(*given)
        elif operation == "release":
            manager.release(given[0], keep=bool(given[1]))
        return operation

    def run(self, trace: list[str]) -> list[str]:
        lines = []
        for line in trace:
            operation, *words = line.split()
            try:
                line = self.apply(operation, *map(int, words))
            except kvleaf.KVError as error:
                name = "admit" if operation == "resume" else operation
                line = f"{name}: {type(error).__name__}"
            if line is not None:
                lines.append(line)
        self.manager.audit()
        stats = self.manager.stats()
        lines.append(
            f"admitted {stats.admitted} refused {stats.refused} hit {stats.hit_tokens} of "
            f"{stats.prompt_tokens} checkpoints {stats.checkpoints} cached {stats.committed_pages}"
        )
        return lines


def main(scratch: Path, programs: list[str], seed: int) -> int:
    scratch.mkdir(parents=True, exist_ok=True)
    trace = make_trace(seed)
    file = scratch / "trace.txt"
    file.write_text("\n".join(trace) + "\n")
    printed = {"Python": Replay().run(trace)}
    for program in programs:
        done = subprocess.run([program, file], capture_output=True, text=True)
        if done.returncode != 0:
            print(f"{program}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr}")
        printed[program] = done.stdout.splitlines()
    wanted = printed["Python"]
    failed = 0
    for name, lines in printed.items():
        for number, (got, want) in enumerate(zip(lines, wanted)):
            if got != want:
                print(f"line {number}, {name}:\n  {got}\nPython:\n  {want}")
                break
        failed += lines != wanted
    text = "\n".join(wanted)
    # The trace must have had what it is meant to compare.
    for part in (
        "hit 8 ",
        "copies 0:",
        "copies 2:",
        "PoolExhausted",
        "fork\n",
        "rewind\n",
        "abandon ",
    ):
        if part not in text:
            failed += 1
            print(f"seed {seed}: nothing in the trace led to '{part.strip()}'")
    print(f"seed {seed}, {text.count('step ')} steps; {wanted[-1]}")
    print(f"{len(printed) - min(failed, len(printed))} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:4], int(sys.argv[4]) if len(sys.argv) > 4 else 1))
