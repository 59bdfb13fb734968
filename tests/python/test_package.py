"""The package as others see it: names, signatures, types, errors."""

import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import kvleaf
import pytest
from kvleaf import _kvleaf

REQUIRED = inspect.Parameter.empty
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
KEYWORD = inspect.Parameter.KEYWORD_ONLY


def parameters(call):
    """[(name, is keyword-only, default)] without self."""
    found = inspect.signature(call).parameters.values()
    return [(p.name, p.kind is KEYWORD, p.default) for p in found if p.name != "self"]


SEED = {
    "__init__": [
        ("leaf_id", False, REQUIRED),
        ("group_id", False, REQUIRED),
        ("bytes_per_page", False, REQUIRED),
        ("stride_alignment", True, None),
    ],
    "blocks_to_reserve": [
        ("num_blocks", False, REQUIRED),
        ("enable_prefix_caching", True, REQUIRED),
    ],
    "staged_input_shapes": [("batch_size", False, REQUIRED), ("num_blocks", False, REQUIRED)],
    "write_staged_inputs": [("plans", False, REQUIRED), ("into", False, REQUIRED)],
    "bound_row_span": [("block", False, REQUIRED)],
    "bound_row_copies": [("src", False, REQUIRED), ("dst", False, REQUIRED)],
}


@pytest.mark.parametrize("method", SEED)
def test_the_region_has_the_published_signatures_and_adds_keywords_with_defaults_only(method):
    published = SEED[method]
    found = parameters(getattr(kvleaf.KVLeafRegion, method))
    assert found[: len(published)] == published
    assert all(
        keyword and default is not REQUIRED for _, keyword, default in found[len(published) :]
    )
    for name in ("leaf_id", "group_id", "bytes_per_page", "stride_alignment", "cacheable"):
        assert isinstance(inspect.getattr_static(kvleaf.KVLeafRegion, name), property)


@pytest.mark.parametrize(
    "call, expected",
    [
        ("plan_geometry", "budget_bytes, pages, *, max_huge_bytes=None, alignment=256"),
        ("Geometry.by_hand", "pages, *, huge_bytes, huge_blocks, ratios, alignment=1"),
        (
            "PageSpec",
            "name, bytes_per_page, stride_alignment=None, weight=1.0, floor=0, ceiling=None, *, "
            "one_per_request=False",
        ),
        ("BlockPool.allocate", "leaf, hint=None, fate='cache'"),
        ("BlockPool.allocate_many", "leaf, n, hint=None, fate='cache'"),
        ("BlockPool.touch", "leaf, block, value=None"),
        ("BlockPool.commit", "leaf, block, key, value=None"),
        (
            "BlockManager",
            "leaves, budget_bytes, *, page_tokens=16, max_len, max_step_tokens=8192, "
            "max_steps_in_flight=2, geometry=None, expected_tokens=2048, "
            "enable_prefix_caching=True, "
            "retention='tail', eviction='value', hash='xxh3_128', seed=None, events=False",
        ),
        (
            "BlockManager.admit",
            "request, tokens, *, salt=b'', adapter='', encoder=None, media=(), priority=0, "
            "guarantee=None, addressable=None, partial=False",
        ),
        ("BlockManager.release", "request, keep=True, addressable=None"),
        ("BlockManager.settle", "step, kept={}"),
        ("BlockManager.fork", "parent, child"),
        ("StepPlanner", "manager, *, max_batch, max_step_tokens"),
        ("StepPlanner.plan", "batch, pad_to=None"),
        ("AccessPattern.window", "tokens, sinks=0"),
        ("AccessPattern.custom", "head=0, tail_begin=None, ahead=0"),
        ("AccessPattern.reach", "n, tokens_per_page, encoder_tokens=0"),
        ("KVCacheGroupId.sliding_window", "window, sinks=0"),
        ("KVCacheGroupId.state", "name='state'"),
        (
            "FullAttentionLeaf",
            "leaf_id, *, layers, kv_heads, head_dim, value_head_dim=None, dtype, tokens_per_page, "
            "slots_per_page=None, table='dense'",
        ),
        ("ScalesLeaf", "values_leaf, *, granularity, dtype"),
        (
            "leaves_from_config",
            "path_or_dict, *, tokens_per_page=16, dtype=None, kv_dtype=None, tensor_parallel=1, "
            "budget_bytes=None, expected_tokens=2048",
        ),
    ],
)
def test_calls_have_the_published_parameters_and_defaults(call, expected):
    thing = kvleaf
    for part in call.split("."):
        thing = getattr(thing, part)
    signature = inspect.signature(thing)
    kept = [
        p.replace(annotation=REQUIRED) for p in signature.parameters.values() if p.name != "self"
    ]
    assert str(inspect.Signature(kept)) == f"({expected})"


def test_bound_methods_have_signatures_too():
    signature = inspect.signature(kvleaf.AccessPattern.full().reach)
    assert list(signature.parameters) == ["n", "tokens_per_page", "encoder_tokens"]


def test_every_public_call_has_a_signature_and_every_public_class_a_home():
    for name in kvleaf.__all__:
        thing = getattr(kvleaf, name)
        if isinstance(thing, type) and not issubclass(thing, BaseException):
            assert (thing.__module__, thing.__doc__ is not None) == ("kvleaf", True), name
            for member in vars(thing).values():
                if hasattr(member, "__nb_signature__"):
                    inspect.signature(member)
    assert repr(kvleaf.PoolExhausted("x")) == "PoolExhausted('x')"
    assert kvleaf.PoolExhausted.__module__ == "kvleaf"


@pytest.mark.parametrize(
    "error, also",
    [
        ("InvalidArgument", ValueError),
        ("GeometryError", ValueError),
        ("PoolExhausted", MemoryError),
        ("BlockError", ValueError),
        ("InvariantError", RuntimeError),
        ("RequestError", ValueError),
        ("StepError", ValueError),
        ("PlanShapeError", ValueError),
        ("ConfigError", ValueError),
        ("DeviceError", RuntimeError),
    ],
)
def test_every_error_is_a_kverror_and_what_python_calls_such(error, also):
    assert issubclass(getattr(kvleaf, error), (kvleaf.KVError,))
    assert issubclass(getattr(kvleaf, error), also)


# ---- types -----------------------------------------------------------------------------------

PACKAGE = Path(kvleaf.__file__).resolve().parent

SAMPLE = Path(__file__).with_name("typed_sample.py")

WRONG = {
    "manager.admit('a')": "call-arg",
    "manager.admit('a', 'text')": "arg-type",
    "manager.begin_step([1])": "list-item",
    "pool.allocate('a') + 1": "operator",
    "plan.nothing": "attr-defined",
    "cache.paged_block_table().numpy()": "union-attr",
    "cache.admit('0', [1])": "arg-type",
    "arena.view('a', shape=3)": "arg-type",
    "kvleaf.KVLayerSpec.latent()": "call-arg",
}


def mypy(folder, *files):
    pytest.importorskip("mypy")
    environment = dict(os.environ)
    if PACKAGE.parent.name != "site-packages":  # there mypy finds it by itself, and wants no path
        environment["MYPYPATH"] = str(PACKAGE.parent)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-error-summary",
            "--cache-dir",
            folder / "cache",
        ]
        + [str(file) for file in files],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
    )


def test_mypy_strict_accepts_what_is_right_and_nothing_else(tmp_path):
    sample = SAMPLE.read_text()
    (tmp_path / "right.py").write_text(sample)
    done = mypy(tmp_path, "right.py")
    assert done.stdout == "" and done.returncode == 0
    wrong = sample + "\n".join(WRONG)
    (tmp_path / "wrong.py").write_text(wrong + "\n")
    done = mypy(tmp_path, "wrong.py")
    first = wrong.count("\n") + 2 - len(WRONG)
    for line, code in enumerate(WRONG.values(), first):
        assert any(
            text.startswith(f"wrong.py:{line}:") and f"[{code}]" in text
            for text in done.stdout.splitlines()
        ), (line, code, done.stdout)


def test_the_sample_runs():
    done = subprocess.run([sys.executable, SAMPLE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_sample_uses_every_public_name():
    used = {
        getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
        for node in ast.walk(ast.parse(SAMPLE.read_text()))
    }
    missing = set(kvleaf.__all__) - used
    classes = {
        node.name: node
        for node in ast.parse((PACKAGE / "_kvleaf.pyi").read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    for name in set(kvleaf.__all__) & set(classes):
        for member in classes[name].body:
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                missing |= {f"{name}.{member.name}"} if member.name not in used else set()
            elif isinstance(member, ast.Assign):
                missing |= {f"{name}.{t.id}" for t in member.targets if t.id not in used}
    assert not missing


def test_the_stubs_say_what_the_module_has(tmp_path):
    pytest.importorskip("nanobind.stubgen")
    bare = tmp_path / "kvleaf"  # without __init__, which gives the classes another home
    bare.mkdir()
    (bare / Path(_kvleaf.__file__).name).symlink_to(Path(_kvleaf.__file__).resolve())
    subprocess.run(
        [
            sys.executable,
            "-m",
            "nanobind.stubgen",
            "-q",
            "-P",
            "-m",
            "kvleaf._kvleaf",
            "-o",
            "made.pyi",
        ],
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(tmp_path)),
        check=True,
    )
    made = (tmp_path / "made.pyi").read_text()
    stub = PACKAGE / "_kvleaf.pyi"
    if os.environ.get("KVLEAF_WRITE_STUBS"):
        Path(os.environ["KVLEAF_WRITE_STUBS"]).write_text(made)
        return
    assert stub.read_text() == made, (
        "bindings/python/kvleaf/_kvleaf.pyi is not what the module has; to write it anew, "
        "run this test with KVLEAF_WRITE_STUBS=bindings/python/kvleaf/_kvleaf.pyi"
    )


# ---- model configurations --------------------------------------------------------------------

GEMMA = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "hidden_size": 5376,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def test_m01_leaves_from_a_configuration_as_dict_or_file(tmp_path):
    leaves = kvleaf.leaves_from_config(GEMMA)
    assert {leaf.leaf_id: (leaf.layers, leaf.bytes_per_page) for leaf in leaves} == {
        "full": (2, 2 * 16 * 16 * 128 * 2 * 2),
        "window_1024": (10, 10 * 16 * 16 * 128 * 2 * 2),
    }
    assert all(isinstance(leaf, kvleaf.AttentionLeaf) for leaf in leaves)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GEMMA))
    for path in (file, str(file)):
        again = kvleaf.leaves_from_config(
            path, tokens_per_page=32, kv_dtype="fp8", tensor_parallel=2, budget_bytes=1 << 34
        )
        assert [leaf.bytes_per_page for leaf in again] == [
            leaf.bytes_per_page // 2 for leaf in leaves
        ]
    manager = kvleaf.BlockManager(leaves, 1 << 30, max_len=4096)
    assert manager.leaves[0] is leaves[0]


def test_an_infinity_in_a_configuration_is_no_obstacle(tmp_path):
    endless = GEMMA | {"time_step_limit": (0.0, float("inf")), "nested": [{"x": float("nan")}]}
    assert [leaf.leaf_id for leaf in kvleaf.leaves_from_config(endless)] == ["window_1024", "full"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(endless | {"lowest": -float("inf")}))
    assert [leaf.leaf_id for leaf in kvleaf.leaves_from_config(file)] == ["window_1024", "full"]
    with pytest.raises(kvleaf.ConfigError, match="num_hidden_layers"):
        kvleaf.leaves_from_config(GEMMA | {"num_hidden_layers": float("inf")})


def test_a_model_tells_which_layers_lie_in_which_leaf():
    model = kvleaf.model_from_config(GEMMA, tokens_per_page=32)
    assert [leaf.leaf_id for leaf in model.leaves] == list(model.layers_of)
    assert model.layers_of == {
        "full": [5, 11],
        "window_1024": [0, 1, 2, 3, 4, 6, 7, 8, 9, 10],
    }
    assert all(leaf.tokens_per_page == 32 for leaf in model.leaves)
    assert [leaf.layers for leaf in model.leaves] == [len(x) for x in model.layers_of.values()]
    assert (model.model_type, model.num_layers, model.dtype) == ("gemma3_text", 12, "bfloat16")
    assert (model.max_len, model.encoder_tokens) == (131072, None)


def test_m06_configurations_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(kvleaf.ConfigError, match="model_type"):
        kvleaf.leaves_from_config({"model_type": "abacus"})
    with pytest.raises(kvleaf.ConfigError, match="missing.json"):
        kvleaf.leaves_from_config(tmp_path / "missing.json")
    with pytest.raises(kvleaf.InvalidArgument):
        kvleaf.leaves_from_config(GEMMA, dtype="abacus")
    with pytest.raises(TypeError):
        kvleaf.leaves_from_config(5)
