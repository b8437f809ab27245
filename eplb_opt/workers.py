"""Work for many processes, here or on a cluster, that a lost worker does not bring down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args

from eplb_opt.errors import SolverUnavailableError

__all__ = ["Backend", "Lost", "Workers"]

Backend: TypeAlias = Literal["loky", "dask", "ray"]

# What each needs, and the extra that has it.
_NEEDS: Mapping[Backend, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "loky": (("joblib", "sweep"), ("cloudpickle", "sweep")),
        "dask": (("joblib", "sweep"), ("distributed", "dask")),
        "ray": (("joblib", "sweep"), ("ray", "ray")),
    }
)

_SECONDS_TO_START = 60  # of a worker in place of a lost one, with all its imports

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Lost(Generic[_Item]):
    """An item whose worker was lost whenever it was tried, in the end alone; and what was said."""

    item: _Item
    reason: str


@dataclass(frozen=True, slots=True)
class Workers:
    """Processes that work side by side, on joblib.

    Parameters
    ----------
    backend
        ``"loky"``: processes of this machine; ``"dask"`` and ``"ray"``: a cluster.
    jobs
        How many; default one per core. With one, loky works in this process.
    address
        Of a cluster's scheduler; default a cluster of this machine, for as long as the work takes.

    Raises
    ------
    ValueError
        An unknown backend, no jobs, or an address for loky.
    SolverUnavailableError
        When a package is not installed; the message names the extra.
    """

    backend: Backend = "loky"
    jobs: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            known = ", ".join(get_args(Backend))
            raise ValueError(f"no backend is called {self.backend!r}; the known ones are: {known}")
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs is {self.jobs}; expected at least 1")
        if self.address is not None and self.backend == "loky":
            raise ValueError("loky works on this machine; an address is for dask and ray")
        for package, extra in _NEEDS[self.backend]:
            if find_spec(package) is None:
                problem = f"{self.backend} workers need {package}"
                raise SolverUnavailableError(f"{problem}: pip install 'eplb-opt[{extra}]'")

    def answers(
        self, work: Callable[..., _Answer], shared: Any, items: Sequence[_Item]
    ) -> Iterator[_Answer | Lost[_Item]]:
        """Yield the answers ``work(shared, item)`` as they come, one for every item.

        `work` is a module's function that raises nothing. `shared` goes to each process once if it
        is a large array.

        Notes
        -----
        When a worker is lost, joblib gives up all that is not answered yet. This is tried again in
        halves, so that an item that takes its worker down (by its memory, say) is soon alone, and
        costs the others no more than ``log2(items)`` new beginnings.
        """
        with _joined(self) as begin:
            waiting = [list(enumerate(items))]
            while waiting:
                group = waiting.pop()
                left = dict(group)
                try:
                    for at, answer in begin(work, shared, group):
                        del left[at]
                        yield answer
                except Exception as error:
                    reason = f"its worker was lost ({type(error).__name__})"
                    if len(group) == 1:
                        yield from (Lost(item, reason) for item in left.values())
                        continue
                    rest = list(left.items())
                    half = -(-len(rest) // 2)
                    waiting += [part for part in (rest[half:], rest[:half]) if part]


def _numbered(work: Callable[..., _Answer], at: int, shared: Any, item: Any) -> tuple[int, _Answer]:
    return at, work(shared, item)


@contextmanager
def _joined(workers: Workers) -> Iterator[Callable[..., Iterator[Any]]]:
    """Join a cluster, if need be, and give what begins a group's work."""
    import joblib

    def begin(work: Any, shared: Any, group: Sequence[tuple[int, Any]]) -> Iterator[Any]:
        parallel = joblib.Parallel(
            -1 if workers.jobs is None else workers.jobs,
            backend=backend(),
            return_as="generator_unordered",
            batch_size=1,
        )
        tasks = (joblib.delayed(_numbered)(work, at, shared, item) for at, item in group)
        answers: Iterator[Any] = parallel(tasks)
        return answers

    clusters = {"loky": _local, "dask": _dask, "ray": _ray}
    with clusters[workers.backend](workers) as backend:
        yield begin


@contextmanager
def _local(_: Workers) -> Iterator[Callable[[], Any]]:
    yield lambda: "loky"


@contextmanager
def _dask(workers: Workers) -> Iterator[Callable[[], Any]]:
    import dask
    import distributed
    from joblib._dask import DaskDistributedBackend

    class Dask(DaskDistributedBackend):  # type: ignore[misc]  # joblib is not typed
        def effective_n_jobs(self, n_jobs: int) -> int:
            """Never 1, for which joblib would work in this process: other workers may come back."""
            jobs: int = super().effective_n_jobs(n_jobs)
            return max(2, jobs)

        def submit(self, func: Any, callback: Any = None) -> Any:
            """Tell of errors too: joblib's own would wait for a lost worker's answer for ever."""
            future = super().submit(func, callback)
            future.add_done_callback(lambda done: done.exception() and callback(done.exception()))
            return future

    with ExitStack() as joined:
        address = workers.address
        if address is None:
            # At once, not at the fourth worker: the work is tried again in halves anyway.
            joined.enter_context(dask.config.set({"distributed.scheduler.allowed-failures": 0}))
            address = joined.enter_context(
                distributed.LocalCluster(
                    n_workers=workers.jobs, threads_per_worker=1, dashboard_address=None
                )
            )
        client = joined.enter_context(distributed.Client(address))
        yield lambda: Dask(client=client, wait_for_workers_timeout=_SECONDS_TO_START)


@contextmanager
def _ray(workers: Workers) -> Iterator[Callable[[], Any]]:
    import ray
    from ray.util.joblib.ray_backend import RayBackend

    class Ray(RayBackend):  # type: ignore[misc]  # joblib is not typed
        # Its pool does call back; joblib denies this of the one of multiprocessing below.
        supports_return_generator = True

    joined = ray.is_initialized()
    if not joined:
        here: dict[str, Any] = (
            {} if workers.address else {"num_cpus": workers.jobs, "include_dashboard": False}
        )
        ray.init(workers.address, log_to_driver=False, **here)
    try:
        yield Ray
    finally:
        if not joined:
            ray.shutdown()
