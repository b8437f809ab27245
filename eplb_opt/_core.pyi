"""
Compiled solvers of eplb-opt; called by the package, not part of its public interface.
"""

from typing import Annotated

import numpy
from numpy.typing import NDArray


MAX_GPUS: int = 1024

MAX_EXPERTS: int = 4096

MAX_TOKENS_PER_EXPERT: int = 549755813887

class Placement:
    def __init__(self, slots: Annotated[NDArray[numpy.int32], dict(order='C', device='cpu', writable=False)], experts: int) -> None: ...

class Answer:
    def __init__(self, tokens: Annotated[NDArray[numpy.int64], dict(order='C', device='cpu')], activated: Annotated[NDArray[numpy.int64], dict(order='C', device='cpu')], makespan: Annotated[NDArray[numpy.float64], dict(order='C', device='cpu')], bound: Annotated[NDArray[numpy.float64], dict(order='C', device='cpu')], status: Annotated[NDArray[numpy.int8], dict(order='C', device='cpu')], proved_by: Annotated[NDArray[numpy.int8], dict(order='C', device='cpu')], certificate: Annotated[NDArray[numpy.bool_], dict(order='C', device='cpu')]) -> None: ...

class Pricing:
    def __init__(self, pieces: Annotated[NDArray[numpy.float64], dict(order='C', device='cpu', writable=False)], curve_tokens: Annotated[NDArray[numpy.float64], dict(order='C', device='cpu', writable=False)], curve_times: Annotated[NDArray[numpy.float64], dict(order='C', device='cpu', writable=False)], tile_tokens: float, slowness: Annotated[NDArray[numpy.float64], dict(order='C', device='cpu', writable=False)], split: bool) -> None: ...

def route_matching(placement: Placement, tokens: object, answer: Answer, threads: int, lexicographic: bool) -> int: ...

def route_flow(placement: Placement, tokens: object, answer: Answer, threads: int) -> int: ...

def route_metro(placement: Placement, tokens: object, answer: Answer, threads: int, order: Annotated[NDArray[numpy.int32], dict(order='C', device='cpu', writable=False)] | None) -> int: ...

def route_makespan(placement: Placement, tokens: object, answer: Answer, threads: int, pricing: Pricing, work: int) -> int: ...

def prove_makespan(placement: Placement, tokens: object, answer: Answer, threads: int, pricing: Pricing, work: int) -> int: ...

def prove_activations(placement: Placement, tokens: object, answer: Answer, threads: int) -> int: ...

def prove_tokens(placement: Placement, tokens: object, answer: Answer, threads: int) -> int: ...

def assign(placement: Placement, routed: Annotated[NDArray[numpy.int64], dict(order='C', device='cpu', writable=False)], topk_ids: Annotated[NDArray[numpy.int32], dict(order='C', device='cpu', writable=False)], physical: Annotated[NDArray[numpy.int32], dict(order='C', device='cpu')]) -> tuple[int, int]: ...

def place_deepseek(load: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)], slots: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order='C', device='cpu')]) -> None: ...
