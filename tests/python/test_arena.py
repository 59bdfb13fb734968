"""Arenas: bytes in every kind of memory, read as tensors. Device parts run where a device is."""

import gc
import weakref

import kvleaf
import numpy as np
import pytest
from kvleaf import Arena, BlockPool, Geometry, PageSpec, Tensor

GEOMETRY = Geometry.by_hand(
    [PageSpec("kv", 96, 16), PageSpec("scales", 20, 4)],
    huge_bytes=112,
    huge_blocks=6,
    ratios=[1, 4],
    alignment=256,
)


def device_present():
    try:
        Arena.cuda(GEOMETRY)
    except kvleaf.DeviceError:
        return False
    return True


needs_device = pytest.mark.skipif(not device_present(), reason="skipped: no device")
ARENAS = [
    Arena.host,
    lambda geometry: Arena.over(geometry, np.zeros(geometry.arena_bytes + 5, np.uint8)),
    pytest.param(Arena.pinned, marks=needs_device),
]


@pytest.mark.parametrize("make", ARENAS)
def test_an_arena_is_zeros_and_its_views_are_numpy_arrays_without_a_copy(make):
    arena = make(GEOMETRY)
    assert arena.device == "cpu" and arena.geometry == GEOMETRY
    assert arena.bytes.shape == (GEOMETRY.arena_bytes,) and not arena.bytes.numpy().any()

    pages = arena.view("kv", "float16", (3, 8), offset=48)
    assert (pages.shape, pages.strides, pages.dtype) == ((7, 3, 8), (56, 8, 1), "float16")
    pages[2] = 1.5
    begin, end = GEOMETRY.byte_range("kv", 2)
    assert end - begin == 96
    assert (arena.bytes[begin + 48 : end].view(np.float16) == 1.5).all()
    assert np.count_nonzero(arena.bytes.numpy()) == 24  # one byte of each 1.5 is not zero

    arena.page("scales", 24)[:] = 7
    assert (arena.view("scales")[24] == 7).all()
    assert arena.view("scales").shape == (25, 20)
    assert arena.view("scales", np.float32).shape == (25, 5)


@pytest.mark.parametrize("make", ARENAS)
def test_views_keep_the_memory_of_an_arena_that_is_gone(make):
    arena = make(GEOMETRY)
    tensor, array = arena.view("kv"), arena.view("kv", "int32").numpy()
    taken = np.from_dlpack(arena.view("kv", "int8"))
    del arena
    gc.collect()
    array[3] = -1
    assert (tensor[3] == 255).all() and (taken[3] == -1).all()
    del tensor, array
    gc.collect()
    assert (taken[3] == -1).all()


def test_an_array_that_an_arena_lies_in_lives_as_long_as_the_last_view():
    class Mine(np.ndarray):
        pass

    memory = np.zeros(GEOMETRY.arena_bytes, np.uint8).view(Mine)
    gone = weakref.ref(memory)
    arena = Arena.over(GEOMETRY, memory)
    memory[300] = 9
    del memory
    view = arena.view("kv")
    assert arena.bytes[300] == 9
    del arena
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_dlpack_in_both_directions():
    arena = Arena.host(GEOMETRY)
    assert arena.__dlpack_device__() == arena.view("kv").__dlpack_device__() == (1, 0)
    whole = np.from_dlpack(arena)
    whole[:] = 3
    again = Arena.over(GEOMETRY, Tensor.from_dlpack(arena))  # the same bytes
    assert again.bytes.data_ptr == arena.bytes.data_ptr
    assert (again.view("kv")[1] == 3).all()

    class Foreign:  # speaks DLPack and nothing else
        def __dlpack__(self, **how):
            return whole.__dlpack__(**how)

        def __dlpack_device__(self):
            return whole.__dlpack_device__()

    assert Arena.over(GEOMETRY, Foreign()).bytes.data_ptr == arena.bytes.data_ptr


def test_a_pool_that_shrinks_gives_memory_back():
    page = 1 << 16
    geometry = Geometry.by_hand(
        [PageSpec("kv", page, 256)], huge_bytes=page, huge_blocks=8, ratios=[1], alignment=page
    )
    arena, pool = Arena.host(geometry), BlockPool(geometry)
    arena.view("kv")[8] = 5
    assert arena.unmap(pool.resize(4)) == 4 * page
    assert arena.map(pool.resize(8)) == 4 * page
    assert not arena.page("kv", 8).numpy().any()
    with pytest.raises(kvleaf.InvalidArgument, match="999999999"):
        arena.unmap([(0, 999999999)])
    with pytest.raises(kvleaf.InvalidArgument, match=r"ranges\[0\] is 5"):
        arena.map([5])
    with pytest.raises(kvleaf.InvalidArgument, match="did not make this memory"):
        Arena.over(geometry, arena).unmap([(0, page)])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda a: a.view("kv", "bfloat16", (7, 7)), r"\[7, 7\].*96 B.*48 elements"),
        (lambda a: a.view("kv", "bfloat16", (1,), offset=1), "page offset 1"),
        (lambda a: a.view("kv", "bfloat16", ()), "shape is empty"),
        (lambda a: a.view("kv", "bfloat16", (1,) * 9), "more than 8"),
        (lambda a: a.view("scales", "int64"), "page stride 28"),
        (lambda a: a.view("nothing"), "kv, scales"),
        (lambda a: Arena.over(GEOMETRY, np.zeros(10, np.uint8)), "10 B"),
        (lambda a: Arena.over(GEOMETRY, np.zeros((32, 32), np.uint8)), r"\[32, 32\]"),
        (lambda a: Arena.over(GEOMETRY, b"text"), "bytes"),
        (lambda a: Arena.cuda(GEOMETRY, -1), "device is -1"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(kvleaf.InvalidArgument, match=message):
        call(Arena.host(GEOMETRY))
    with pytest.raises(kvleaf.BlockError, match="25"):
        Arena.host(GEOMETRY).page("scales", 25)
    with pytest.raises(TypeError, match="pickled"):
        Arena.host(GEOMETRY).__reduce_ex__(4)


def test_a_device_that_is_not_there_is_a_typed_error_with_the_bytes():
    with pytest.raises(kvleaf.DeviceError, match=f"{GEOMETRY.arena_bytes} B.*CUDA device 4095"):
        Arena.cuda(GEOMETRY, 4095)
    if not device_present():
        with pytest.raises(kvleaf.DeviceError, match="pinned"):
            Arena.pinned(GEOMETRY)


@needs_device
def test_an_arena_on_a_device_is_handed_to_other_frameworks_and_taken_back():
    arena = Arena.cuda(GEOMETRY)
    assert arena.device == "cuda:0" and arena.__dlpack_device__() == (2, 0)
    pages = arena.view("kv", "float16", (6, 8))
    assert (pages.shape, pages.strides, pages.device) == ((7, 6, 8), (56, 8, 1), "cuda:0")
    with pytest.raises(kvleaf.InvalidArgument, match="host memory"):
        pages.numpy()
    again = Arena.over(GEOMETRY, Tensor.from_dlpack(arena))
    assert again.device == "cuda:0" and again.bytes.data_ptr == arena.bytes.data_ptr
