"""Adds up Meson's test log to one line, `N passed, N failed`, after the output of what failed.

    python .ci/summary.py build/meson-logs/testlog.json

A test executable holds many cases. Where its output ends with doctest's or pytest's summary, the
cases are counted; else the executable is one. A test that failed without a failed case (a crash,
a sanitizer's report, a time-out) is one failure more. Exits 1 unless something passed and nothing
failed.
"""

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple


class Count(NamedTuple):
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other):
        return Count(*(a + b for a, b in zip(self, other)))


DOCTEST = re.compile(
    r"\[doctest\] test cases:\s*\d+ \|\s*(\d+) passed \|\s*(\d+) failed \|\s*(\d+) skipped"
)
# pytest's last line, "= 3 passed, 1 skipped in 0.10s =", and our own scripts' "3 passed, 0 failed".
WORDS = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)\b")


def count_cases(output: str) -> Count:
    """The cases that a test's output reports; none if it reports none."""
    doctest = DOCTEST.findall(output)
    if doctest:
        passed, failed, skipped = map(int, doctest[-1])
        return Count(passed, failed, skipped)
    lines = output.strip().splitlines()
    words = {word: int(number) for number, word in WORDS.findall(lines[-1])} if lines else {}
    return Count(
        words.get("passed", 0) + words.get("xfailed", 0),
        sum(words.get(word, 0) for word in ("failed", "error", "errors", "xpassed")),
        words.get("skipped", 0),
    )


def count_test(test: dict) -> Count:
    cases = count_cases(test.get("stdout", ""))
    if test["result"] == "SKIP":
        return Count(skipped=1)
    if test["result"] in ("OK", "EXPECTEDFAIL"):
        return cases if cases != Count() else Count(passed=1)
    return cases if cases.failed else cases + Count(failed=1)


def main(log: Path) -> int:
    tests = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    total = Count()
    for test in tests:
        count = count_test(test)
        total += count
        if test["result"] == "SKIP":
            said = test.get("stdout", "").strip().splitlines()
            print(f"{test['name']}: {said[-1] if said else 'skipped'}")
        if count.failed:
            print(f"\n==== {test['name']}: {test['result']} " + "=" * 40)
            print(test.get("stdout", "") + test.get("stderr", ""))
            print("again: " + " ".join(test["command"]))
    if not tests:
        print("no test was run", file=sys.stderr)
        total = Count(failed=1)
    skipped = f", {total.skipped} skipped" if total.skipped else ""
    print(f"{total.passed} passed, {total.failed} failed{skipped}", flush=True)
    return 0 if total.passed and not total.failed else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
