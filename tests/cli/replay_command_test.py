"""`kvleaf replay`: every published trace and several models with real bytes checked, the report's
forms, and how it fails.

    replay_command_test.py KVLEAF DATA     the executable; the folder of models/ and traces/
"""

import gzip
import json
import os
import pathlib
import pty
import subprocess
import sys
import tempfile
import unittest

KVLEAF = sys.argv[1]
DATA = pathlib.Path(sys.argv[2])
AGENT = DATA / "traces/agent_sessions.jsonl.gz"
PROMISED = {
    "requests",
    "prompt_tokens",
    "hit_tokens",
    "hit_pct",
    "refused",
    "growth_refused",
    "preemptions",
    "us_per_request",
    "peak_bytes",
    "leaves",
}


def model(name):
    return DATA / f"models/{name}.json"


def replay(trace, *arguments, model_name="llama-3.1-70b"):
    return subprocess.run(
        [KVLEAF, "replay", str(trace), "--model", str(model(model_name)), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )


class Served(unittest.TestCase):
    def report(self, trace, *arguments, **options):
        result = replay(trace, *arguments, "--json", **options)
        self.assertEqual((result.returncode, result.stderr), (0, ""), arguments)
        return json.loads(result.stdout)

    def test_every_published_trace_is_served_with_its_bytes_checked(self):
        for trace in sorted((DATA / "traces").glob("*.gz")):
            with self.subTest(trace.name):
                report = self.report(
                    trace, "--limit", 20, "--verify", "--budget", "64GiB", model_name="gemma-3-27b"
                )
                self.assertLessEqual(PROMISED, set(report))
                self.assertEqual(report["requests"], 20)
                self.assertEqual(report["refused"], 0)
                self.assertGreater(report["verify"]["entries_checked"], report["computed_tokens"])
                for leaf in report["leaves"].values():
                    self.assertLessEqual(
                        {"live", "cached", "clean", "padding", "blocks", "lost_tokens"}, set(leaf)
                    )

    def test_models_of_every_kind_serve_a_trace_with_their_bytes_checked(self):
        for name in (
            "llama-3.1-70b",
            "gemma-2-27b",
            "gemma-3-27b",
            "gpt-oss-20b",
            "qwen3-next-80b-a3b",
            "nemotron-3-nano-30b-a3b",
            "deepseek-v3",
            "deepseek-v4-flash",
            "llama-3.2-11b-vision",
            "whisper-large-v3",
            "llama-4-scout",
        ):
            with self.subTest(name):
                report = self.report(
                    AGENT,
                    "--limit",
                    60,
                    "--verify",
                    "--budget",
                    "24GiB",
                    "--max-live",
                    8,
                    model_name=name,
                )
                self.assertEqual((report["requests"], report["refused"]), (60, 0))
                self.assertEqual(report["preemptions"], 0)
                if name not in (
                    "llama-3.2-11b-vision",
                    "whisper-large-v3",
                ):  # no two inputs are the same there
                    self.assertGreater(report["hit_pct"], 20)
                else:
                    self.assertEqual(report["hit_tokens"], 0)

    def test_bounds_are_printed_beside_what_was_reached(self):
        report = self.report(AGENT, "--limit", 300, "--budget", "8GiB", "--bound")
        bound = report["bound"]
        self.assertEqual(bound["cache_pages"], report["leaves"]["full"]["blocks"])
        self.assertEqual(bound["cache_tokens"], 16 * bound["cache_pages"])
        self.assertLessEqual(bound["lru_hit_pct"], bound["optimum_hit_pct"])
        self.assertLessEqual(report["hit_pct"], bound["optimum_hit_pct"])
        self.assertNotIn("bound", self.report(AGENT, "--limit", 5))
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder, "out.html")
            text = replay(
                AGENT, "--limit", 300, "--budget", "8GiB", "--bound", "--report", page
            ).stdout
            html = page.read_text()
        lru, optimum = (f"{bound[f'{rule}_hit_pct']:.2f} %" for rule in ("lru", "optimum"))
        self.assertIn(f"LRU {lru}, offline optimum {optimum}", text)
        self.assertIn(f"<b>{lru}</b>LRU", html)
        self.assertIn(f"<b>{optimum}</b>the offline optimum", html)
        self.assertIn(f"LRU, whole run: {lru}", html)
        self.assertIn(f"offline optimum, whole run: {optimum}", html)
        self.assertIn(f"a cache of {bound['cache_tokens']:,} tokens", html)

    def test_options_reach_the_manager(self):
        plain = self.report(AGENT, "--limit", 150, "--budget", "8GiB", model_name="gemma-3-27b")
        self.assertEqual(
            (plain["page_tokens"], plain["max_live"], plain["max_step_tokens"]), (16, 64, 8192)
        )
        other = self.report(
            AGENT,
            "--limit",
            150,
            "--budget",
            "8GiB",
            "--page-tokens",
            32,
            "--max-live",
            4,
            "--max-step-tokens",
            512,
            "--retention",
            "dense",
            "--eviction",
            "lru",
            model_name="gemma-3-27b",
        )
        self.assertEqual(
            (other["page_tokens"], other["max_live"], other["max_step_tokens"]), (32, 4, 512)
        )
        self.assertEqual((other["retention"], other["eviction"]), ("dense", "lru"))
        self.assertGreater(other["step_us"]["count"], plain["step_us"]["count"])
        self.assertNotEqual(other["leaves"]["full"]["blocks"], plain["leaves"]["full"]["blocks"])
        for retention in ("spaced", "512"):
            self.report(AGENT, "--limit", 20, "--retention", retention)

    def test_a_plain_file_is_read_like_a_compressed_one(self):
        with tempfile.TemporaryDirectory() as folder:
            plain = pathlib.Path(folder, "trace")
            plain.write_bytes(gzip.decompress(AGENT.read_bytes()))
            one, two = (self.report(trace, "--limit", 100) for trace in (AGENT, plain))
            self.assertEqual(one["hit_tokens"], two["hit_tokens"])

    def test_text_report_and_page(self):
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder, "out.html")
            result = replay(AGENT, "--limit", 100, "--verify", "--report", page)
            self.assertEqual((result.returncode, result.stderr), (0, ""))
            for words in (
                "100, ",
                "reused",
                "lost to",
                "refused",
                "peak",
                "full",
                "median",
                "p99",
                "verified",
                "per request",
            ):
                self.assertIn(words, result.stdout)
            text = page.read_text()
            self.assertEqual(text.count("<svg"), 3)
            self.assertNotIn("optimum", text)
            self.assertNotIn("http", text)

    def test_a_terminal_gets_a_bar(self):
        leader, follower = pty.openpty()
        result = subprocess.run(
            [KVLEAF, "replay", AGENT, "--model", model("llama-3.1-70b"), "--limit", "400"],
            stdout=subprocess.PIPE,
            stderr=follower,
            timeout=120,
        )
        os.close(follower)
        shown = os.read(leader, 1 << 16).decode()
        os.close(leader)
        self.assertEqual(result.returncode, 0)
        self.assertIn("/400 requests", shown)
        self.assertNotIn("\n", shown)


class Refused(unittest.TestCase):
    def refused(self, expected, trace, *arguments, code=2, **options):
        """One line on standard error that says these words, nothing on standard output."""
        result = replay(trace, *arguments, **options)
        self.assertEqual((result.returncode, result.stdout), (code, ""), result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        for words in expected:
            self.assertIn(words, result.stderr)

    def test_traces_that_cannot_be_read(self):
        with tempfile.TemporaryDirectory() as folder:

            def write(name, data):
                path = pathlib.Path(folder, name)
                path.write_bytes(data)
                return path

            good = b'{"input_length": 20, "output_length": 1, "hash_ids": [0, 1]}\n'
            whole = AGENT.read_bytes()
            self.refused(
                ["cut.gz", "cut off after 50000 of 50000"],
                write("cut.gz", whole[:50000]),
                "--limit",
                3,
            )
            self.refused(
                ["bad.jsonl: row 2", "not JSON"], write("bad.jsonl", good + b"{]\n"), "--limit", 1
            )
            self.refused(
                ["miss.jsonl: row 2", "output_length", "accepted"],
                write("miss.jsonl", good + b'{"input_length": 3, "hash_ids": [0]}\n'),
            )
            self.refused(
                ["word.jsonl: row 1", "input_length is", "would be accepted"],
                write("word.jsonl", b'{"input_length": "x", "output_length": 1, "hash_ids": []}\n'),
            )
            self.refused(["a.csv", "header", "ContextTokens"], write("a.csv", b"a,b\n1,2\n"))
            self.refused(
                ["b.csv: row 2", "GeneratedTokens"],
                write("b.csv", b"ContextTokens,GeneratedTokens\n1,2\n3,four\n"),
            )
            self.refused(["empty", "accepted"], write("empty", b""))
            self.refused(["none.jsonl", "No such file"], pathlib.Path(folder, "none.jsonl"))

    def test_numbers_that_cannot_be(self):
        self.refused(["--page-tokens", "from 1"], AGENT, "--page-tokens", 0)
        self.refused(["--max-live", "from 1"], AGENT, "--max-live", 0)
        self.refused(["--limit", "from 1"], AGENT, "--limit", 0)
        self.refused(["--max-len", "from 1"], AGENT, "--max-len", 0)
        self.refused(["--budget", "16GiB"], AGENT, "--budget", "many")
        self.refused(["--retention", "tail, dense, spaced"], AGENT, "--retention", "most")
        self.refused(["--retention", "tail, dense, spaced"], AGENT, "--retention", "0")
        self.refused(["--eviction", "value or lru"], AGENT, "--eviction", "random")
        self.refused(
            ["--report", "/nowhere/out.html"], AGENT, "--limit", 1, "--report", "/nowhere/out.html"
        )

    def test_a_budget_too_small_names_what_would_start(self):
        self.refused(["budget", "full"], AGENT, "--budget", "1MiB")

    def test_models_that_cannot_be_read(self):
        self.refused(["nothing.json"], AGENT, model_name="nothing")

    def test_a_request_beyond_max_len_is_refused_and_the_rest_is_served(self):
        with tempfile.TemporaryDirectory() as folder:
            trace = pathlib.Path(folder, "t.csv")
            trace.write_text("ContextTokens,GeneratedTokens\n100,5\n5000,5\n80,5\n")
            result = replay(trace, "--max-len", 1000, "--json")
            self.assertEqual((result.returncode, result.stderr), (0, ""))
            report = json.loads(result.stdout)
            self.assertEqual((report["requests"], report["refused"]), (3, 1))
            self.assertEqual(report["refusals"][0]["first_row"], 2)
            self.assertIn("max_len", report["refusals"][0]["reason"])
            self.assertIn("5000", report["refusals"][0]["example"])
            self.assertEqual(report["computed_tokens"], 190)
            self.assertIn("row 2: 5000 tokens", replay(trace, "--max-len", 1000).stdout)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
