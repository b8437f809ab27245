"""TensorRT-LLM's files: the load balancer's configuration, and its expert statistics.

The configuration is the YAML that `moe_config.load_balancer` names; the statistics are the folder
that ``EXPERT_STATISTIC_PATH`` names (NVIDIA/TensorRT-LLM, ``examples/wide_ep/ep_load_balancer``).
Both number layers as the model does, its dense layers included.
"""

from __future__ import annotations

import importlib
import json
import re
import reprlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_opt.errors import FormatError, SolverUnavailableError
from eplb_opt.formats.counts import checked_rows
from eplb_opt.formats.parsing import import_safetensors, parsing, the_one
from eplb_opt.formats.slots import Ends, Table, flat_table
from eplb_opt.formats.values import expert_ids, value_of, without_repeats
from eplb_opt.load_trace import LoadTrace

__all__ = ["ASSIGNMENTS", "META", "read_config", "read_statistics", "yaml_bytes"]

ASSIGNMENTS = "initial_global_assignments"
_SLOTS = "num_slots"
_UPDATES = "layer_updates_per_iter"
_LARGEST = 2**63 - 1
META = "meta_info.json"
_EXPERTS, _TOP_K = "num_experts", "num_experts_per_token"
_RANK = re.compile(r"rank(0|[1-9][0-9]*)\.safetensors")  # not rank0_raw.safetensors
_KEY = re.compile(r"(0|[1-9][0-9]{0,17})_(0|[1-9][0-9]{0,17})")

_Key = tuple[int, int]  # iteration and layer


def read_config(path: Path, num_gpus: int | None, ends: Ends) -> Table:
    """Read the initial assignments of a load balancer's configuration.

    Parameters
    ----------
    path
        YAML with ``initial_global_assignments: {layer: [expert of each slot]}``; ``num_slots`` and
        ``layer_updates_per_iter`` are checked if there. Other keys are not read.
    num_gpus
        GPUs, over which the slots divide.
    ends
        Layers to leave out, of those in the file.

    Raises
    ------
    FormatError
        When it is something else; the place is a path such as
        ``initial_global_assignments[3][17]``, in which 3 is the layer's number in the model.
    SolverUnavailableError
        When PyYAML is not installed.
    """
    content = _load_yaml(path)
    names = list(map(str, content)) if isinstance(content, dict) else []
    the_one(path, "key", names, (ASSIGNMENTS,))
    assignments = value_of(path, "", content, ASSIGNMENTS, dict)
    for key in (_SLOTS, _UPDATES):
        if content.get(key) is not None and value_of(path, "", content, key, int) < 0:
            raise FormatError(path, key, f"{content[key]}; expected a whole number, not negative")
    for layer in assignments:
        if type(layer) is not int or layer < 0:
            problem = f"{reprlib.repr(layer)}; expected the number of a layer"
            raise FormatError(path, ASSIGNMENTS, problem)
    layers = sorted(assignments)
    _require_even_steps(path, ASSIGNMENTS, layers)
    kept = ends.kept(path, ASSIGNMENTS, len(layers))
    rows = []
    for layer in layers[kept.start : kept.stop]:
        place = f"{ASSIGNMENTS}[{layer}]"
        rows.append((place, expert_ids(path, place, assignments[layer])))
    for place, ids in rows:
        wanted = content.get(_SLOTS)
        if wanted not in (None, ids.size):
            raise FormatError(path, place, f"{ids.size} slots; {_SLOTS} says {wanted}")
        if ids.size != rows[0][1].size:
            raise FormatError(path, place, f"{ids.size} slots; {rows[0][0]} has {rows[0][1].size}")
    return flat_table(path, ASSIGNMENTS, rows, num_gpus)


def yaml_bytes(maps: npt.NDArray[np.integer], layer_ids: Sequence[int]) -> bytes:
    """Return the configuration that starts from a physical-to-logical map and keeps it.

    Parameters
    ----------
    maps : int array, [layers, P]
        The expert in every slot.
    layer_ids
        The number of each layer in the model.
    """
    lines = [f"{_SLOTS}: {maps.shape[1]}", f"{ASSIGNMENTS}:"]
    lines += [f"  {layer}: {ids}" for layer, ids in zip(layer_ids, maps.tolist(), strict=True)]
    lines += [f"{_UPDATES}: 0  # the placement stays; a larger number rebalances it while serving"]
    return ("\n".join(lines) + "\n").encode()


def read_statistics(folder: Path) -> LoadTrace:
    """Sum the expert statistics of all ranks, one rank in memory at a time.

    Parameters
    ----------
    folder
        ``meta_info.json`` with ``num_experts``, perhaps ``num_experts_per_token``, and from 0 on a
        ``rank{r}.safetensors`` per rank, with counts [experts] under ``{iteration}_{layer}``. An
        iteration and layer that one rank lacks may come from another. Other files are not read.

    Returns
    -------
    LoadTrace
        Iterations and layers in the order of their numbers.

    Raises
    ------
    FormatError
        When it is something else: its path is that of the file, the place such as ``12_3[17]``.
    SolverUnavailableError
        When safetensors is not installed.
    """
    meta = folder / META
    with meta.open("rb") as file, parsing(meta):
        content = json.load(file, object_pairs_hook=without_repeats)
    experts = _size(meta, content, _EXPERTS)
    top_k = _size(meta, content, _TOP_K) if _TOP_K in content else None
    paths = _rank_files(folder)
    keys = {key for path in paths for key in _keys(path)}
    if not keys:
        raise FormatError(folder, "", "no counts in any rank's file")
    iterations = sorted({iteration for iteration, _ in keys})
    layers = sorted({layer for _, layer in keys})
    _require_all(folder, keys, iterations, layers)
    rows = {key: at for at, key in enumerate((i, n) for i in iterations for n in layers)}
    total = np.zeros((len(rows), experts), dtype=np.int64)
    for path in paths:
        keys_of_rank, counts = _read_rank(path, experts)
        at = [rows[key] for key in keys_of_rank]
        for index, expert in np.argwhere(counts > _LARGEST - total[at])[:1].tolist():
            place = f"{_spelled(keys_of_rank[index])}[{expert}]"
            raise FormatError(folder, place, "the sum over ranks exceeds 2^63-1")
        total[at] += counts
    tokens = total.reshape(len(iterations), len(layers), experts)
    return LoadTrace(tokens, top_k=top_k, layer_ids=tuple(layers))


def _load_yaml(path: Path) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        problem = f"reading {path} needs PyYAML: pip install 'eplb-opt[files]'"
        raise SolverUnavailableError(problem) from error
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc]  # a class that is known when it runs
        """The safe loader, which alone would keep the last of repeated keys in silence."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            # A few nested merges ("<<") can spell a billion keys.
            if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
                raise ValueError("merged mappings (<<) are not read")
            mapping = super().construct_mapping(node, deep)
            if len(mapping) != len(node.value):
                raise ValueError("a key occurs twice in one mapping")
            return mapping

    with path.open("rb") as file, parsing(path):
        return yaml.load(file, Loader=Loader)


def _size(meta: Path, content: Any, key: str) -> int:
    size = value_of(meta, "", content, key, int)
    if size < 1:
        raise FormatError(meta, key, f"{size}; expected at least 1")
    return size


def _rank_files(folder: Path) -> list[Path]:
    """Return the ranks' files in order of rank."""
    found = {
        int(match[1]): path for path in folder.iterdir() if (match := _RANK.fullmatch(path.name))
    }
    for rank in range(max(found, default=0) + 1):
        if rank not in found:
            raise FormatError(folder, f"rank{rank}.safetensors", "this file is missing")
    return [found[rank] for rank in sorted(found)]


def _keys(path: Path) -> list[_Key]:
    """Return the keys of one rank's file, from its header."""
    safetensors = import_safetensors(f"reading {path}")
    with path.open("rb"), parsing(path), safetensors.safe_open(path, framework="numpy") as file:
        names = sorted(file.keys())  # the library's order varies
    keys = []
    for name in names:
        match = _KEY.fullmatch(name)
        if match is None:
            raise FormatError(path, name, "expected a key {iteration}_{layer}, such as 12_3")
        keys.append((int(match[1]), int(match[2])))
    return keys


def _read_rank(path: Path, experts: int) -> tuple[list[_Key], npt.NDArray[np.integer]]:
    """Return one rank's keys, and its counts [keys, experts]."""
    keys = _keys(path)
    if not keys:
        return [], np.empty((0, experts), dtype=np.int64)
    content = path.read_bytes()
    with parsing(path):
        tensors = import_safetensors(f"reading {path}", "safetensors.numpy").load(content)
    names = list(map(_spelled, keys))
    for name in names:
        if tensors[name].shape != (experts,):
            problem = f"shape {list(tensors[name].shape)}; {META} says {experts} experts"
            raise FormatError(path, name, problem)
    return keys, checked_rows(path, names, [tensors[name] for name in names])


def _spelled(key: _Key) -> str:
    return f"{key[0]}_{key[1]}"


def _require_all(folder: Path, keys: set[_Key], iterations: list[int], layers: list[int]) -> None:
    """Refuse statistics with a gap: an iteration, or a layer of one, that no rank has."""
    for before, after in pairwise(iterations):
        if after != before + 1:
            problem = f"iteration {before + 1} is missing between {before} and {after}"
            raise FormatError(folder, f"{before + 1}_{layers[0]}", problem)
    _require_even_steps(folder, "", layers)
    missing = {(i, layer) for i in iterations for layer in layers} - keys
    if missing:
        raise FormatError(folder, _spelled(min(missing)), "no rank has these counts")


def _require_even_steps(path: Path, place: str, layers: list[int]) -> None:
    """Refuse layers with a gap; in some models every second layer only has experts."""
    step = min((b - a for a, b in pairwise(layers)), default=1)
    for before, after in pairwise(layers):
        if after - before != step:
            problem = f"layer {before + step} is missing between {before} and {after}"
            raise FormatError(path, place, problem)
