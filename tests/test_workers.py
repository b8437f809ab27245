"""Work for many processes: everything is answered, whatever becomes of a worker."""

from __future__ import annotations

import importlib.util
from collections import Counter
from typing import Any

import pytest

from eplb_opt.errors import SolverUnavailableError
from eplb_opt.workers import Workers

pytest.importorskip("joblib")


def test_one_job_works_here() -> None:
    """Every item once, with what all share."""
    assert Counter(Workers(jobs=1).answers(pow, 2, [0, 5, 3])) == Counter([1, 8, 32])
    assert list(Workers(jobs=1).answers(pow, 2, [])) == []


def test_a_cluster_that_is_there() -> None:
    """Dask's, by its address; a cluster of this machine has the same road."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        workers = Workers("dask", address=cluster.scheduler_address)
        assert Counter(workers.answers(pow, 2, [0, 5, 3])) == Counter([1, 8, 32])


def test_ray() -> None:
    """Two workers of a cluster of this machine; it starts in 10 seconds or more."""
    pytest.importorskip("ray")
    assert Counter(Workers("ray", jobs=2).answers(pow, 2, [0, 5, 3])) == Counter([1, 8, 32])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "spark"}, "no backend is called 'spark'; the known ones are: loky, dask, ray"),
        ({"jobs": 0}, "jobs is 0"),
        ({"address": "tcp://10.0.0.1:8786"}, "an address is for dask and ray"),
    ],
)
def test_workers_that_cannot_be(given: Any, message: str) -> None:
    """They are refused before any work."""
    with pytest.raises(ValueError, match=message):
        Workers(**given)


@pytest.mark.parametrize(
    ("backend", "package", "extra"),
    [("loky", "joblib", "sweep"), ("dask", "distributed", "dask"), ("ray", "ray", "ray")],
)
def test_a_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, backend: Any, package: str, extra: str
) -> None:
    """As the message says, pip installs it."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "eplb_opt.workers.find_spec", lambda name: None if name == package else real(name)
    )
    with pytest.raises(SolverUnavailableError, match=rf"need {package}: .*eplb-opt\[{extra}\]"):
        Workers(backend)
