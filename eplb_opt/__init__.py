"""Proven optima and serving-speed solvers for expert placement and routing in MoE serving.

Examples
--------
>>> import eplb_opt as eo
>>> placement = eo.Placement([[0, 1], [0, 2], [1, 3], [2, 3]])
>>> eo.solve_routing(placement, [4, 4, 4, 4]).activated
array([1, 1, 1, 1])
"""

try:
    from eplb_opt import _core as _core
except ImportError as error:
    raise ImportError(
        f"{__path__[0]} holds the sources only, without the compiled core. To use the installed "
        "package, start Python in another folder; to use the sources, pip install -e ."
    ) from error

from eplb_opt.advice import Advice, Verdict
from eplb_opt.advising import advise
from eplb_opt.bounds import certified_bound, placement_bound
from eplb_opt.budget import MoveCurve
from eplb_opt.demand import count_tokens
from eplb_opt.errors import (
    EplbError,
    FormatError,
    InfeasibleError,
    InvalidPlacementError,
    InvalidTokensError,
    SolverUnavailableError,
    SweepError,
)
from eplb_opt.formats.placements import PlacementFormat, read_placement, write_placement
from eplb_opt.gap import optimality_gap
from eplb_opt.heat import CollectThenDecide, PeriodicDump, SlidingWindow, StageFilter
from eplb_opt.loop import BreakEven, EplbLoop, Worth
from eplb_opt.measure import Measure, Split
from eplb_opt.memory import memory_per_gpu
from eplb_opt.metrics import PlacementMetrics
from eplb_opt.objective import OBJECTIVES, Curve, Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.placers import placement_methods
from eplb_opt.placing import PlacementPlan, move_curve, solve_placement
from eplb_opt.recorder import Recorder
from eplb_opt.regime import RegimeMap, regime_map
from eplb_opt.replaying import Replay, Stale, replay
from eplb_opt.routers import RoutingMethod, routing_methods
from eplb_opt.routing import Router, Routing, RoutingSummary, solve_routing
from eplb_opt.scenario import Scenario
from eplb_opt.settings import AscendEplb, Deployment, SglangEplb, VllmEplb
from eplb_opt.status import Proof, Status
from eplb_opt.step_time import Communication, Line, Migration, StepTime
from eplb_opt.stopping import TimeLimit
from eplb_opt.sweep_folder import read_sweep
from eplb_opt.sweep_results import Sweep, SweepRow
from eplb_opt.sweeping import sweep
from eplb_opt.topology import Transport, transport
from eplb_opt.trace import LoadTrace, StepFacts, TokenTrace, read_trace, write_trace
from eplb_opt.transfer import (
    Links,
    TransferPlan,
    expert_bytes,
    plan_transfer,
    saving_per_step,
)
from eplb_opt.workload import MODEL_SHAPES, ModelShape, Workload, model_shape

__version__: str


def __getattr__(name: str) -> str:
    """Look the version up when it is asked for: reading package metadata slows every start."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("eplb-opt")


__all__ = [
    "MODEL_SHAPES",
    "OBJECTIVES",
    "Advice",
    "AscendEplb",
    "BreakEven",
    "CollectThenDecide",
    "Communication",
    "Curve",
    "Deployment",
    "EplbError",
    "EplbLoop",
    "FormatError",
    "InfeasibleError",
    "InvalidPlacementError",
    "InvalidTokensError",
    "Line",
    "Links",
    "LoadTrace",
    "Measure",
    "Migration",
    "ModelShape",
    "MoveCurve",
    "Objective",
    "PeriodicDump",
    "Piece",
    "Placement",
    "PlacementFormat",
    "PlacementMetrics",
    "PlacementPlan",
    "Proof",
    "Recorder",
    "RegimeMap",
    "Replay",
    "Router",
    "Routing",
    "RoutingMethod",
    "RoutingSummary",
    "Scenario",
    "SglangEplb",
    "SlidingWindow",
    "SolverUnavailableError",
    "Split",
    "StageFilter",
    "Stale",
    "Status",
    "StepFacts",
    "StepTime",
    "Sweep",
    "SweepError",
    "SweepRow",
    "TimeLimit",
    "TokenTrace",
    "TransferPlan",
    "Transport",
    "Verdict",
    "VllmEplb",
    "Workload",
    "Worth",
    "advise",
    "certified_bound",
    "count_tokens",
    "expert_bytes",
    "memory_per_gpu",
    "model_shape",
    "move_curve",
    "optimality_gap",
    "placement_bound",
    "placement_methods",
    "plan_transfer",
    "read_placement",
    "read_sweep",
    "read_trace",
    "regime_map",
    "replay",
    "routing_methods",
    "saving_per_step",
    "solve_placement",
    "solve_routing",
    "sweep",
    "transport",
    "write_placement",
    "write_trace",
]
