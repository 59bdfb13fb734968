"""Checks kvleaf.h as a foreign language sees it.

    interface.py ROOT LIBRARY SCRATCH COMPILER...

A compiler is that of C or of C++, as its name says. Prints what is wrong, then `N passed, N
failed`.
"""

import re
import subprocess
import sys
from pathlib import Path

# What geometry, pool, manager and planner can do, under the names of C++ and Python, and its C
# function; fields and options are members of the structs named.
OPERATIONS = {
    "PageSpec": "kvleaf_page_spec",
    "PageSpec of a leaf": "kvleaf_page_spec_of",
    "plan_geometry": "kvleaf_plan_geometry",
    "Geometry.by_hand": "kvleaf_geometry_by_hand",
    "geometry.arena_bytes": "kvleaf_geometry_info.arena_bytes",
    "geometry.null_bytes": "kvleaf_geometry_info.null_bytes",
    "geometry.huge_bytes": "kvleaf_geometry_info.huge_bytes",
    "geometry.huge_blocks": "kvleaf_geometry_info.huge_blocks",
    "geometry.cost": "kvleaf_geometry_info.cost",
    "geometry.leaves.name": "kvleaf_leaf_geometry.name",
    "geometry.leaves.bytes_per_page": "kvleaf_leaf_geometry.bytes_per_page",
    "geometry.leaves.page_stride": "kvleaf_leaf_geometry.page_stride",
    "geometry.leaves.ratio": "kvleaf_leaf_geometry.ratio",
    "geometry.leaves.base_offset": "kvleaf_leaf_geometry.base_offset",
    "geometry.leaves.blocks": "kvleaf_leaf_geometry.blocks",
    "geometry.leaves.floor": "kvleaf_leaf_geometry.floor",
    "geometry.leaves.ceiling": "kvleaf_leaf_geometry.ceiling",
    "geometry.byte_range": "kvleaf_geometry_byte_range",
    "Arena.host, pinned, cuda": "kvleaf_arena_create",
    "Arena.over": "kvleaf_arena_over",
    "Arena.over a DLPack tensor": "kvleaf_arena_over_dlpack",
    "arena.bytes": "kvleaf_arena_bytes",
    "arena.page": "kvleaf_arena_page",
    "arena.view": "kvleaf_arena_view",
    "arena.unmap": "kvleaf_arena_unmap",
    "arena.map": "kvleaf_arena_map",
    "BlockPool": "kvleaf_pool_create",
    "pool.allocate": "kvleaf_pool_allocate",
    "pool.free": "kvleaf_pool_free",
    "pool.touch": "kvleaf_pool_touch",
    "pool.allocate_all": "kvleaf_pool_allocate_all",
    "pool.can_allocate": "kvleaf_pool_can_allocate",
    "pool.commit": "kvleaf_pool_commit",
    "pool.revalue": "kvleaf_pool_revalue",
    "pool.uncommit": "kvleaf_pool_uncommit",
    "pool.find": "kvleaf_pool_find",
    "pool.on_evict": "kvleaf_pool_on_evict",
    "pool.allocate_many": "kvleaf_pool_allocate_many",
    "pool.free_many": "kvleaf_pool_free_many",
    "pool.touch_many": "kvleaf_pool_touch_many",
    "pool.commit_many": "kvleaf_pool_commit_many",
    "pool.plan_compaction": "kvleaf_pool_plan_compaction",
    "pool.move": "kvleaf_pool_move",
    "pool.resize": "kvleaf_pool_resize",
    "pool.stats": "kvleaf_pool_stats",
    "pool.stats.leaves": "kvleaf_pool_leaf_stats",
    "pool.audit": "kvleaf_pool_audit",
    "BlockManager": "kvleaf_manager_create",
    "BlockManager(budget_bytes)": "kvleaf_manager_options.budget_bytes",
    "BlockManager(page_tokens)": "kvleaf_manager_options.page_tokens",
    "BlockManager(max_len)": "kvleaf_manager_options.max_len",
    "BlockManager(max_step_tokens)": "kvleaf_manager_options.max_step_tokens",
    "BlockManager(max_steps_in_flight)": "kvleaf_manager_options.max_steps_in_flight",
    "BlockManager(geometry)": "kvleaf_manager_options.geometry",
    "BlockManager(expected_tokens)": "kvleaf_manager_options.expected_tokens",
    "BlockManager(enable_prefix_caching)": "kvleaf_manager_options.disable_prefix_caching",
    "BlockManager(retention)": "kvleaf_manager_options.retention",
    "BlockManager(eviction)": "kvleaf_manager_options.eviction",
    "BlockManager(hash)": "kvleaf_manager_options.hash",
    "BlockManager(seed)": "kvleaf_manager_options.seed",
    "manager.geometry": "kvleaf_manager_geometry",
    "manager.pool": "kvleaf_manager_pool",
    "manager.longest_request": "kvleaf_manager_longest_request",
    "manager.admit": "kvleaf_manager_admit",
    "admit(salt)": "kvleaf_admit_options.salt",
    "admit(adapter)": "kvleaf_admit_options.adapter",
    "admit(encoder)": "kvleaf_admit_options.encoder_digest",
    "admit(media)": "kvleaf_admit_options.media",
    "admit(priority)": "kvleaf_admit_options.priority",
    "admit(guarantee)": "kvleaf_admit_options.guarantee",
    "admit(addressable)": "kvleaf_admit_options.addressable",
    "admit(partial)": "kvleaf_admit_options.partial",
    "Admission.hit_tokens": "kvleaf_admission.hit_tokens",
    "Admission.lost": "kvleaf_admission.lost",
    "Admission.reason": "kvleaf_admission.reason",
    "Admission.next_stop": "kvleaf_admission.next_stop",
    "Admission.encoder_cached": "kvleaf_admission.encoder_cached",
    "manager.probe": "kvleaf_manager_probe",
    "manager.append": "kvleaf_manager_append",
    "manager.next_stop": "kvleaf_manager_next_stop",
    "manager.encoder_filled": "kvleaf_manager_encoder_filled",
    "manager.begin_step": "kvleaf_manager_begin_step",
    "Step.id": "kvleaf_step.id",
    "Step.served": "kvleaf_step.served",
    "Step.refused": "kvleaf_step.refused",
    "Step.copies": "kvleaf_step.copies",
    "Step.zero_fills": "kvleaf_step.zero_fills",
    "manager.settle": "kvleaf_manager_settle",
    "manager.abandon": "kvleaf_manager_abandon",
    "manager.take_events": "kvleaf_manager_take_events",
    "manager.fork": "kvleaf_manager_fork",
    "manager.rewind": "kvleaf_manager_rewind",
    "manager.preempt": "kvleaf_manager_preempt",
    "manager.release": "kvleaf_manager_release",
    "manager.blocks": "kvleaf_manager_blocks",
    "manager.live_block": "kvleaf_manager_live_block",
    "manager.length": "kvleaf_manager_length",
    "manager.computed": "kvleaf_manager_computed",
    "manager.stats": "kvleaf_manager_stats",
    "manager.audit": "kvleaf_manager_audit",
    "manager.reset_cache": "kvleaf_manager_reset_cache",
    "StepPlanner": "kvleaf_planner_create",
    "planner.plan": "kvleaf_planner_plan",
    "plan.step": "kvleaf_plan_info.step",
    "plan.refused": "kvleaf_plan_info.refused",
    "plan.rows": "kvleaf_plan_info.rows",
    "plan.arrays": "kvleaf_plan_array",
    "plan.slot_mapping": "kvleaf_plan_slot_mapping",
    "plan.seq_lens": "kvleaf_plan_info.seq_lens",
    "plan.cu_seqlens_q": "kvleaf_plan_info.cu_seqlens_q",
    "plan.copies": "kvleaf_plan_info.copies",
    "plan.zero_fills": "kvleaf_plan_info.zero_fills",
    "plan.dirty": "kvleaf_plan_dirty",
    "plan.changes": "kvleaf_plan_changes",
    "planner.settle": "kvleaf_planner_settle",
    "planner.abandon": "kvleaf_planner_abandon",
}
# All that a member or a parameter may be made of; besides, the types of the header itself.
FIXED = {
    "void",
    "char",
    "size_t",
    "double",
    "uint8_t",
    "uint32_t",
    "uint64_t",
    "int32_t",
    "int64_t",
}


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)


def functions(text: str) -> set[str]:
    """Declared with a name, not through a pointer."""
    return set(re.findall(r"(?<!\()\b(kvleaf_\w+)\s*\((?!\s*\*)", text))


def structs(text: str) -> dict[str, set[str]]:
    """The members of each, by its name."""
    found = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\n\} (\w+);", text, re.DOTALL):
        found[name] = set(re.findall(r"(\w+)(?:\[\d+\])?;", body))
        found[name] |= set(re.findall(r"\(\*(\w+)\)", body))
    return found


def wrong_words(text: str):
    """Types that are no fixed width, bit fields, and macros that would be needed."""
    own = set(re.findall(r"\b(kvleaf_\w+)\b", text))
    for line in text.splitlines():
        if re.search(r"\w\s*:\s*\d", line):
            yield f"a bit field: {line.strip()}"
        if re.match(r"\s*#\s*define\s+\w+\(", line):
            yield f"a macro with parameters: {line.strip()}"
    for word in re.findall(r"\b(\w+)\b\s+\**\s*\w+\s*[;,)\[]", text):
        if word not in FIXED | own | {"const", "struct", "extern", "enum"}:
            yield f"a type that is not of fixed width: {word}"
    for body in re.findall(r"\benum\s+\w+", text):
        yield f"an enum as a type: {body}"


def compiles(header: Path, scratch: Path, compiler: str) -> str | None:
    plus = "++" in Path(compiler).name
    source = scratch / f"header_{Path(compiler).name}.{'cpp' if plus else 'c'}"
    source.write_text('#include "kvleaf.h"\n#include "kvleaf.h"\nint main(void) { return 0; }\n')
    flags = ["-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{header.parent}"]
    command = [compiler, "-std=c++20" if plus else "-std=c99", *flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode == 0 else f"{' '.join(command)}\n{done.stderr}"


def main(root: Path, library: Path, scratch: Path, compilers: list[str]) -> int:
    scratch.mkdir(parents=True, exist_ok=True)
    header = root / "bindings/c/kvleaf.h"
    text = without_comments(header.read_text(encoding="utf-8"))
    walk = (root / "tests/c/walk.c").read_text(encoding="utf-8")
    declared, members = functions(text), structs(text)
    results: list[str | None] = [compiles(header, scratch, compiler) for compiler in compilers]

    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True)
    symbols = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines()}
    symbols -= {"KVLEAF_1"}
    results.append(
        f"declared, not exported: {sorted(declared - symbols)}" if declared - symbols else None
    )
    results.append(
        f"exported, not declared: {sorted(symbols - declared)}" if symbols - declared else None
    )

    for operation, name in OPERATIONS.items():
        struct, _, member = name.partition(".")
        there = member in members.get(struct, ()) if member else name in declared | set(members)
        results.append(None if there else f"{operation} has no {name}")
    for name in sorted(declared):
        called = re.search(rf"\b{name}\s*\(", walk)
        results.append(None if called else f"tests/c/walk.c does not call {name}")
    wrong = list(wrong_words(text))
    results += wrong or [None]

    for message in filter(None, results):
        print(message)
    failed = sum(map(bool, results))
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed or len(declared) < 90 else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
