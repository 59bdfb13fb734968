"""The commands `kvleaf leaves` and `kvleaf plan`: what they print, and how they fail.

command_test.py KVLEAF MODELS     the executable, and the folder of model configurations
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

KVLEAF = sys.argv[1]
MODELS = pathlib.Path(sys.argv[2])
GIB = 1 << 30


def run(*arguments, **options):
    return subprocess.run(
        [KVLEAF, *map(str, arguments)], capture_output=True, text=True, timeout=120, **options
    )


def model(name):
    return MODELS / f"{name}.json"


class Printed(unittest.TestCase):
    def output(self, *arguments):
        result = run(*arguments)
        self.assertEqual((result.returncode, result.stderr), (0, ""), arguments)
        return result.stdout

    def parsed(self, *arguments):
        """`--json` prints one object and nothing else."""
        value = json.loads(self.output(*arguments, "--json"))
        self.assertIsInstance(value, dict)
        return value

    def test_version_and_help(self):
        self.assertRegex(self.output("--version"), r"^kvleaf \d+\.\d+\.\d+\n$")
        for command in ("leaves", "plan", "replay"):
            self.assertIn(command, self.output("--help"))
            self.assertIn("--page-tokens", self.output(command, "--help"))
        self.assertIn("--budget", self.output("plan", "--help"))

    def test_plan_has_the_promised_keys_and_adds_up(self):
        for name in ("gemma-3-27b", "qwen3-next-80b-a3b", "deepseek-v4-flash", "whisper-large-v3"):
            with self.subTest(name):
                plan = self.parsed("plan", model(name), "--budget", "16GiB")
                for key in (
                    "arena_bytes",
                    "null_bytes",
                    "huge_bytes",
                    "huge_blocks",
                    "longest_request",
                    "metadata_bytes",
                ):
                    self.assertIsInstance(plan[key], int, key)
                self.assertIsInstance(plan["cost"], float)
                self.assertAlmostEqual(plan["cost"], sum(plan["cost_terms"].values()))
                self.assertEqual(
                    plan["arena_bytes"],
                    plan["null_bytes"] + plan["huge_bytes"] * plan["huge_blocks"],
                )
                self.assertLessEqual(plan["arena_bytes"], 16 * GIB)
                self.assertGreater(plan["metadata_bytes"], 0)
                self.assertLess(0, plan["pool_metadata_bytes_per_page"])
                self.assertLessEqual(plan["pool_metadata_bytes_per_page"], 48)
                for leaf in plan["leaves"]:
                    self.assertEqual(
                        set(leaf),
                        {
                            "id",
                            "group",
                            "layers",
                            "bytes_per_page",
                            "page_stride",
                            "ratio",
                            "blocks",
                        },
                    )
                    self.assertLessEqual(leaf["bytes_per_page"], leaf["page_stride"])
                    self.assertEqual(leaf["page_stride"] * leaf["ratio"], plan["huge_bytes"])
                    self.assertEqual(leaf["blocks"], leaf["ratio"] * plan["huge_blocks"])

    def test_plan_says_why_a_state_was_split(self):
        plan = self.parsed("plan", model("qwen3-next-80b-a3b"), "--budget", "16GiB")
        states = [leaf for leaf in plan["leaves"] if leaf["group"] == "state"]
        self.assertEqual([leaf["layers"] for leaf in states], [12, 12, 12])
        (split,) = plan["splits"]
        self.assertEqual((split["leaf"], split["layers"], split["parts"]), ("state", 36, 3))
        costs = {candidate["parts"]: candidate["cost"] for candidate in split["candidates"]}
        self.assertEqual(sorted(costs), [1, 2, 3, 4, 6, 9, 12, 18, 36])
        self.assertEqual(min(costs, key=costs.get), 3)
        text = self.output("plan", model("qwen3-next-80b-a3b"), "--budget", "16GiB")
        self.assertIn("state is split into 3 leaves of 12 layers", text)

    def test_longest_request_is_what_the_blocks_hold(self):
        # C-05: one leaf, one block per huge block; the null region takes one page of the budget.
        with tempfile.TemporaryDirectory() as folder:
            config = pathlib.Path(folder) / "config.json"
            config.write_text(
                json.dumps(
                    {
                        "model_type": "llama",
                        "num_hidden_layers": 1,
                        "num_attention_heads": 8,
                        "head_dim": 64,
                    }
                )
            )
            page = 16 * 2 * 8 * 64 * 2
            for pages, longest in ((33, 512), (32, 496)):
                plan = self.parsed("plan", config, "--budget", pages * page, "--max-len", 512)
                self.assertEqual(plan["leaves"][0]["blocks"], pages - 1)
                self.assertEqual(plan["longest_request"], longest)

    def test_max_len_bounds_the_longest_request(self):
        config = model("llama-3.1-70b")
        self.assertEqual(self.parsed("plan", config, "--budget", "16GiB")["max_len"], 131072)
        plan = self.parsed("plan", config, "--budget", "16GiB", "--max-len", 1000)
        self.assertEqual((plan["max_len"], plan["longest_request"]), (1000, 1000))
        # A model that names no positions is planned for the usual length, and says so.
        text = self.output("plan", model("bamba-9b"), "--budget", "16GiB")
        self.assertIn("the model does not say: --max-len does", text)

    def test_sizes_may_be_written_in_several_ways(self):
        plans = [
            self.output("plan", model("gpt-oss-20b"), "--budget", size, "--json")
            for size in ("16GiB", "16 GiB", "16G", "17179869184")
        ]
        self.assertEqual(len(set(plans)), 1)

    def test_leaves_of_every_model(self):
        for config in sorted(MODELS.glob("*.json")):
            with self.subTest(config.stem):
                table = self.parsed("leaves", config)
                self.assertEqual(table["model_type"], json.loads(config.read_text())["model_type"])
                self.assertTrue(table["leaves"])
                for length in ("bytes_8k", "bytes_128k"):
                    self.assertEqual(table[length], sum(leaf[length] for leaf in table["leaves"]))
                for leaf in table["leaves"]:
                    self.assertEqual(len(leaf["model_layers"]), leaf["layers"])
                    self.assertIn(leaf["per"], ("token", "encoder token", "request"))
                    self.assertLessEqual(leaf["bytes_8k"], leaf["bytes_128k"])
                    self.assertIn(leaf["id"], self.output("leaves", config))

    def test_costs_of_a_request(self):
        leaves = {
            leaf["id"]: leaf for leaf in self.parsed("leaves", model("gemma-3-27b"))["leaves"]
        }
        self.assertEqual(leaves["full"]["bytes"], 81920)
        self.assertEqual(leaves["full"]["bytes_8k"], 8192 * 81920)
        self.assertEqual(leaves["full"]["bytes_128k"], 131072 * 81920)
        # A window of 1,024 lies in at most 65 pages of 16.
        self.assertEqual(leaves["window_1024"]["bytes_8k"], 65 * 6815744)
        self.assertEqual(leaves["window_1024"]["bytes_128k"], 65 * 6815744)
        leaves = {
            leaf["id"]: leaf for leaf in self.parsed("leaves", model("whisper-large-v3"))["leaves"]
        }
        self.assertEqual(leaves["cross"]["bytes_8k"], 94 * 2621440)  # 1,500 encoder tokens
        leaves = {leaf["id"]: leaf for leaf in self.parsed("leaves", model("jamba-v0.1"))["leaves"]}
        self.assertEqual(
            (leaves["state"]["per"], leaves["state"]["bytes_8k"]),
            ("request", 28 * (49152 + 524288)),
        )

    def test_options_change_the_leaves(self):
        def full(*options):
            return self.parsed("leaves", model("llama-3.1-70b"), *options)["leaves"][0][
                "bytes_per_page"
            ]

        whole = full()
        self.assertEqual(full("--kv-dtype", "fp8") * 2, whole)
        self.assertEqual(full("--tensor-parallel", 4) * 4, whole)
        self.assertEqual(full("--page-tokens", 64), whole * 4)
        self.assertEqual(full("--dtype", "float32"), whole * 2)


class Refused(unittest.TestCase):
    """Wrong input: exit code 2, nothing on standard output, one line on standard error."""

    def refused(self, *arguments, says):
        result = run(*arguments)
        self.assertEqual((result.returncode, result.stdout), (2, ""), arguments)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        for text in [says] if isinstance(says, str) else says:
            self.assertIn(text, result.stderr)

    def test_command_lines(self):
        gemma = model("gemma-3-27b")
        self.refused(says="expected a command: leaves, plan, replay")
        self.refused("plot", says=['"plot" is no command', "leaves, plan, replay"])
        self.refused("plan", gemma, says="--budget is required")
        self.refused("plan", says="CONFIG is required")
        self.refused("plan", gemma, "--budget", "16XB", says=['"16XB" is no size', "16GiB"])
        self.refused("plan", gemma, "--budget", "0", says="--budget")
        self.refused(
            "plan", gemma, "--budget", "1G", "--max-len", "many", says=["--max-len", '"many"']
        )
        self.refused("plan", gemma, "--budget", "1G", "--bogus", says="--bogus")
        self.refused(
            "leaves", gemma, "--page-tokens", "0", says=["--page-tokens", "from 1 to 65536"]
        )
        self.refused(
            "leaves", gemma, "--kv-dtype", "fp3", says=["--kv-dtype", "fp3", "float8_e4m3"]
        )
        self.refused(
            "leaves",
            model("llama-3.1-70b"),
            "--tensor-parallel",
            "3",
            says=["num_key_value_heads", "tensor_parallel 3", "expected"],
        )

    def test_a_budget_that_is_too_small(self):
        # The least budget is named, and is enough.
        result = run("plan", model("gemma-3-27b"), "--budget", "1MiB")
        self.refused(
            "plan",
            model("gemma-3-27b"),
            "--budget",
            "1MiB",
            says=["gemma-3-27b.json", "--budget 1,048,576", "window_1024", "20447232"],
        )
        self.assertEqual(result.returncode, 2)
        self.assertEqual(run("plan", model("gemma-3-27b"), "--budget", "20447232").returncode, 0)
        self.refused("plan", model("gemma-3-27b"), "--budget", "20447231", says="20447232")

    def test_files(self):
        self.refused("leaves", "nowhere.json", says=["nowhere.json", "No such file"])
        self.refused("leaves", MODELS, says="is a directory")
        with tempfile.TemporaryDirectory() as folder:

            def refused(text, says):
                config = pathlib.Path(folder) / "config.json"
                config.write_text(text)
                self.refused("leaves", config, says=["config.json", *says])
                self.refused("plan", config, "--budget", "1GiB", says=["config.json", *says])

            refused("", ["is not JSON"])
            refused('{"model_type": "llama",', ["is not JSON", "line 1"])
            refused("{\n\n\n]", ["is not JSON", "line 4"])
            refused("[]", ["holds no object"])
            refused("{}", ["model_type is missing"])
            refused(
                '{"model_type": "retnet"}', ["retnet", "expected one of", "llama", "qwen3_next"]
            )
            gemma = json.loads(model("gemma-3-27b").read_text())
            del gemma["text_config"]["num_attention_heads"]
            refused(json.dumps(gemma), ["text_config.num_attention_heads is missing"])
            gemma = json.loads(model("gemma-3-27b").read_text())
            gemma["text_config"]["layer_types"][7] = "dilated"
            refused(json.dumps(gemma), ["layer_types[7]", "dilated", "full_attention"])


class Failed(unittest.TestCase):
    def test_output_that_cannot_be_written(self):
        with open("/dev/full", "w") as full:
            result = subprocess.run(
                [KVLEAF, "leaves", str(model("gemma-3-27b"))],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
            )
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stderr, "kvleaf leaves: standard output cannot be written\n")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
