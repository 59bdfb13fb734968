"""Caches of hybrid language models: every kind of memory a leaf, one pool of bytes.

    leaves   what a cache holds: FullAttentionLeaf, SlidingWindowLeaf, RecurrentStateLeaf, ... or a
             KVLeafRegion of your own
    pool     plan_geometry and BlockPool: page sizes, no tokens
    group    BlockManager: requests, prefix reuse, steps in flight
    planner  StepPlanner: the arrays of one forward, as NumPy views

A pool, manager or planner belongs to one thread.
"""

from kvleaf import _signatures
from kvleaf._kvleaf import (
    AccessPattern,
    Admission,
    AttentionLeaf,
    BlockError,
    BlockManager,
    BlockPool,
    ChunkedAttentionLeaf,
    ConfigError,
    CrossAttentionLeaf,
    Event,
    FullAttentionLeaf,
    Geometry,
    GeometryError,
    GroupStats,
    InvalidArgument,
    InvariantError,
    KVCacheGroupId,
    KVError,
    KVLeafRegion,
    LatentAttentionLeaf,
    LeafGeometry,
    LeafStats,
    ManagerStats,
    PageSpec,
    PlanShapeError,
    PoolExhausted,
    PoolStats,
    RecurrentStateLeaf,
    RequestError,
    RowDelta,
    ScalesLeaf,
    ScratchLeaf,
    Slab,
    SlidingWindowLeaf,
    Step,
    StepError,
    StepPlan,
    StepPlanner,
    leaves_from_config,
    plan_geometry,
)

__all__ = [
    "AccessPattern",
    "Admission",
    "AttentionLeaf",
    "BlockError",
    "BlockManager",
    "BlockPool",
    "ChunkedAttentionLeaf",
    "ConfigError",
    "CrossAttentionLeaf",
    "Event",
    "FullAttentionLeaf",
    "Geometry",
    "GeometryError",
    "GroupStats",
    "InvalidArgument",
    "InvariantError",
    "KVCacheGroupId",
    "KVError",
    "KVLeafRegion",
    "LatentAttentionLeaf",
    "LeafGeometry",
    "LeafStats",
    "ManagerStats",
    "PageSpec",
    "PlanShapeError",
    "PoolExhausted",
    "PoolStats",
    "RecurrentStateLeaf",
    "RequestError",
    "RowDelta",
    "ScalesLeaf",
    "ScratchLeaf",
    "Slab",
    "SlidingWindowLeaf",
    "Step",
    "StepError",
    "StepPlan",
    "StepPlanner",
    "leaves_from_config",
    "plan_geometry",
]

_signatures.install(globals()[name] for name in __all__)
