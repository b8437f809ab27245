"""The settings that engines' users already have, checked, and the `EplbLoop` that they describe.

=============== ===========================================================================
`AscendEplb`    vLLM-Ascend's ``eplb_config``, with its environment variables
`VllmEplb`      vLLM's ``EPLBConfig``
`SglangEplb`    SGLang's flags
=============== ===========================================================================

Messages have the engine's own names. All start from expert p mod E in physical slot p, or from the
map that they name.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_args

from eplb_opt.arrays import as_integer
from eplb_opt.formats.placements import PlacementFormat, read_placement
from eplb_opt.heat import CollectThenDecide, HeatStage, PeriodicDump, SlidingWindow, StageFilter
from eplb_opt.loop import EplbLoop, Worth
from eplb_opt.placement import Placement
from eplb_opt.placers import first_placement

__all__ = ["AscendEplb", "Deployment", "SglangEplb", "VllmEplb"]

_Settings = TypeVar("_Settings", "AscendEplb", "VllmEplb", "SglangEplb")


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the settings do not say.

    Parameters
    ----------
    num_layers
        MoE layers.
    num_experts
        Experts per layer.
    num_gpus
        The EP size.
    num_nodes, num_groups
        As for `eplb_opt.solve_placement`.
    most_decode_tokens
        As for `eplb_opt.heat.stage_of`; needed where one stage is collected.
    dense_layers
        Layers before the first MoE layer, for which SGLang's maps have rows.
    """

    num_layers: int
    num_experts: int
    num_gpus: int
    num_nodes: int = 1
    num_groups: int = 1
    most_decode_tokens: int | None = None
    dense_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "num_gpus", "num_nodes", "num_groups"):
            as_integer(getattr(self, name), name)
        as_integer(self.dense_layers, "dense_layers", least=0)

    def first(self, redundant: int, name: str) -> Placement:
        """Return what an engine starts with.

        Raises
        ------
        ValueError
            Slots that do not divide over the GPUs; `name` is the engine's for `redundant`.
        """
        slots = self.num_experts + redundant
        if slots % self.num_gpus:
            more = -slots % self.num_gpus
            raise ValueError(
                f"{name} is {redundant}: {self.num_experts} experts + {redundant} redundant are "
                f"not divisible by the EP size {self.num_gpus}; {redundant + more} would be"
            )
        per_gpu = slots // self.num_gpus
        experts = self.num_experts
        start = first_placement(self.num_layers, self.num_gpus, per_gpu, num_experts=experts)
        return Placement(start, experts)


_GUARDS = ("DYNAMIC_EPLB", "EXPERT_MAP_RECORD")
_ASCEND_POLICIES = ("ascend-random", "ascend-default", "swift", "flashlb")


@dataclass(frozen=True, slots=True)
class AscendEplb:
    """vLLM-Ascend's ``eplb_config``, part of ``--additional-config``.

    A dynamic placement needs the environment variable ``DYNAMIC_EPLB=true``; recording a map needs
    it or ``EXPERT_MAP_RECORD=true``, and updates the placement too; a static map needs none.
    Policy 3 keeps samples of earlier windows in the engine, and here sees one window.

    References
    ----------
    vLLM-Ascend's user guide on EPLB, and ``vllm_ascend/ascend_config.py``.

    Examples
    --------
    >>> config = {"dynamic_eplb": True, "num_redundant_experts": 16, "eplb_policy_type": 2}
    >>> settings = AscendEplb.of(config, {"DYNAMIC_EPLB": "true"})
    >>> loop = settings.loop(Deployment(num_layers=2, num_experts=128, num_gpus=16))
    >>> loop.heat.collection_interval, loop.method, loop.placement.slots_per_gpu
    (600, Swift(), 9)
    >>> AscendEplb.of(config, {})
    Traceback (most recent call last):
    ValueError: eplb_config: dynamic_eplb needs the environment variable DYNAMIC_EPLB=true
    """

    dynamic_eplb: bool = False
    expert_map_path: str | None = None
    expert_heat_collection_interval: int = 600
    algorithm_execution_interval: int = 50
    expert_map_record_path: str | None = None
    num_redundant_experts: int = 0
    eplb_policy_type: int = 2
    eplb_heat_collection_stage: HeatStage = "all"

    def __post_init__(self) -> None:
        """Refuse what the engine would."""
        _check_types("eplb_config", self)
        at_least = {"expert_heat_collection_interval": 1, "algorithm_execution_interval": 1}
        _check_integers("eplb_config", self, at_least | {"num_redundant_experts": 0})
        _check_known("eplb_config", self, "eplb_policy_type", range(len(_ASCEND_POLICIES)))
        _check_known("eplb_config", self, "eplb_heat_collection_stage", get_args(HeatStage))
        for name in ("expert_map_path", "expert_map_record_path"):
            path = getattr(self, name)
            if path is not None and not str(path).endswith(".json"):
                raise ValueError(f"eplb_config: {name} is {path!r}; expected a .json file")

    @classmethod
    def of(
        cls, eplb_config: Mapping[str, Any], environ: Mapping[str, str] | None = None
    ) -> AscendEplb:
        """Read an ``eplb_config``.

        Parameters
        ----------
        eplb_config
            As it is given to the engine.
        environ
            The environment variables; by default this process's.

        Raises
        ------
        ValueError
            A name or value that the engine does not know, or an environment variable that is not
            set.
        """
        settings = _read("eplb_config", cls, eplb_config)
        variables = os.environ if environ is None else environ
        on = {name for name in _GUARDS if variables.get(name, "").lower() in ("true", "1")}
        if settings.dynamic_eplb and "DYNAMIC_EPLB" not in on:
            needs = "dynamic_eplb needs the environment variable DYNAMIC_EPLB=true"
            raise ValueError(f"eplb_config: {needs}")
        if settings.expert_map_record_path is not None and not on:
            needs = "the environment variable DYNAMIC_EPLB=true or EXPERT_MAP_RECORD=true"
            raise ValueError(f"eplb_config: expert_map_record_path needs {needs}")
        return settings

    def loop(self, deployment: Deployment) -> EplbLoop:
        """Return the loop of a deployment.

        Raises
        ------
        ValueError
            Redundant experts that do not divide, or a stage without `most_decode_tokens`.
        FormatError, OSError
            A map that cannot be read, or is of another deployment.
        """
        if self.expert_map_path is None:
            redundant = self.num_redundant_experts
            placement = deployment.first(redundant, "eplb_config: num_redundant_experts")
        else:
            placement = _read_map(
                "eplb_config: expert_map_path",
                self.expert_map_path,
                PlacementFormat.VLLM_ASCEND,
                deployment,
            )
        if not self.dynamic_eplb and self.expert_map_record_path is None:
            return EplbLoop(placement, None)
        heat = CollectThenDecide(
            self.expert_heat_collection_interval,
            self.algorithm_execution_interval,
            StageFilter(self.eplb_heat_collection_stage, deployment.most_decode_tokens),
        )
        return EplbLoop(
            placement,
            heat,
            method=_ASCEND_POLICIES[self.eplb_policy_type],
            record=self.expert_map_record_path,
            record_format=PlacementFormat.VLLM_ASCEND,
        )


@dataclass(frozen=True, slots=True)
class VllmEplb:
    """vLLM's ``EPLBConfig``, ``--eplb-config``; for ``--enable-eplb``.

    With `use_async` the engine commits a layer when its weights have arrived; here all layers are
    committed when the placement is decided, as without. Balancedness is logged by the loop, and
    `communicator` is the engine's affair.

    References
    ----------
    vLLM, ``vllm/config/parallel.py``.

    Examples
    --------
    >>> settings = VllmEplb.of({"window_size": 1000, "step_interval": 3000})
    >>> loop = settings.loop(Deployment(num_layers=2, num_experts=128, num_gpus=16))
    >>> loop.heat.step_interval
    3000
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False
    log_balancedness_interval: int = 1
    use_async: bool = False
    policy: str = "default"
    communicator: str | None = None

    def __post_init__(self) -> None:
        """Refuse what the engine would."""
        _check_types("eplb_config", self)
        least = dict.fromkeys(("window_size", "step_interval", "log_balancedness_interval"), 1)
        _check_integers("eplb_config", self, least | {"num_redundant_experts": 0})
        _check_known("eplb_config", self, "policy", ("default",))

    @classmethod
    def of(cls, eplb_config: Mapping[str, Any]) -> VllmEplb:
        """Read an ``EPLBConfig`` as a dict.

        Raises
        ------
        ValueError
            A name or value that the engine does not know.
        """
        return _read("eplb_config", cls, eplb_config)

    def loop(self, deployment: Deployment) -> EplbLoop:
        """Return the loop of a deployment.

        Raises
        ------
        ValueError
            Redundant experts that do not divide.
        """
        redundant = self.num_redundant_experts
        return EplbLoop(
            deployment.first(redundant, "eplb_config: num_redundant_experts"),
            SlidingWindow(self.window_size, self.step_interval),
            num_nodes=deployment.num_nodes,
            num_groups=deployment.num_groups,
        )


_SGLANG_METHODS = {
    "auto": "deepseek",
    "deepseek": "deepseek:form=global",
    "deepseek_hierarchical": "deepseek:form=hierarchical",
}


@dataclass(frozen=True, slots=True)
class SglangEplb:
    """SGLang's flags about EPLB.

    The threshold is heeded as the engine does where it also measures balancedness
    (``--enable-expert-distribution-metrics``); without that flag, or at 1, it rebalances always.

    References
    ----------
    SGLang, ``srt/server_args.py`` and ``srt/eplb/eplb_manager.py``.

    Examples
    --------
    >>> flags = ["--enable-eplb", "--ep-num-redundant-experts", "32"]
    >>> flags += ["--eplb-rebalance-num-iterations=500", "--eplb-rebalance-layers-per-chunk", "1"]
    >>> loop = SglangEplb.of(flags).loop(Deployment(num_layers=2, num_experts=256, num_gpus=32))
    >>> loop.heat.iterations, loop.heat.layers_per_chunk, loop.placement.slots_per_gpu
    (500, 1, 9)
    """

    enable_eplb: bool = False
    ep_num_redundant_experts: int = 0
    eplb_algorithm: str = "auto"
    eplb_rebalance_num_iterations: int = 1000
    eplb_rebalance_layers_per_chunk: int | None = None
    eplb_min_rebalancing_utilization_threshold: float = 1.0
    expert_distribution_recorder_buffer_size: int | None = None
    enable_expert_distribution_metrics: bool = False
    init_expert_location: str = "trivial"

    def __post_init__(self) -> None:
        """Refuse what the engine would."""
        _check_types("SGLang", self)
        least = {"ep_num_redundant_experts": 0, "eplb_rebalance_num_iterations": 1}
        optional = ("eplb_rebalance_layers_per_chunk", "expert_distribution_recorder_buffer_size")
        given = {name: 1 for name in optional if getattr(self, name) is not None}
        _check_integers("SGLang", self, least | given)
        _check_known("SGLang", self, "eplb_algorithm", _SGLANG_METHODS)
        threshold = self.eplb_min_rebalancing_utilization_threshold
        if not 0 <= threshold <= 1:
            name = "eplb_min_rebalancing_utilization_threshold"
            raise ValueError(f"SGLang: {name} is {threshold}; expected 0 to 1")
        size = self.expert_distribution_recorder_buffer_size
        if size is not None and size > self.eplb_rebalance_num_iterations:
            raise ValueError(
                f"SGLang: eplb_rebalance_num_iterations is {self.eplb_rebalance_num_iterations}; "
                f"expected at least expert_distribution_recorder_buffer_size, {size}"
            )

    @classmethod
    def of(cls, flags: Mapping[str, Any] | Sequence[str]) -> SglangEplb:
        """Read flags.

        Parameters
        ----------
        flags
            ``ServerArgs`` by name, or the command line's words. Flags of a command line that are
            not about EPLB are passed over; names of a mapping must be known.

        Raises
        ------
        ValueError
            A name or value that the engine does not know, or a flag without its value.
        """
        if isinstance(flags, Mapping):
            return _read("SGLang", cls, flags)
        return cls(**_parse_flags(flags))

    def loop(self, deployment: Deployment) -> EplbLoop:
        """Return the loop of a deployment.

        Raises
        ------
        ValueError
            Redundant experts that do not divide.
        FormatError, OSError
            A map that cannot be read, or is of another deployment.
        """
        placement = deployment.first(
            self.ep_num_redundant_experts, "SGLang: ep_num_redundant_experts"
        )
        if self.init_expert_location != "trivial":
            name, path = "SGLang: init_expert_location", self.init_expert_location
            placement = _read_map(name, path, PlacementFormat.SGLANG, deployment)
        if not self.enable_eplb:
            return EplbLoop(placement, None)
        threshold = self.eplb_min_rebalancing_utilization_threshold
        heeded = self.enable_expert_distribution_metrics and threshold < 1
        return EplbLoop(
            placement,
            PeriodicDump(
                self.eplb_rebalance_num_iterations,
                self.expert_distribution_recorder_buffer_size,
                self.eplb_rebalance_layers_per_chunk,
            ),
            method=_SGLANG_METHODS[self.eplb_algorithm],
            num_nodes=deployment.num_nodes,
            num_groups=deployment.num_groups,
            worth=Worth(max_balancedness=threshold if heeded else None),
        )


def _read(engine: str, cls: type[_Settings], given: Mapping[str, Any]) -> _Settings:
    known = [f.name for f in fields(cls)]
    for name in given:
        if name not in known:
            raise ValueError(f"{engine} has no {name!r}; it has: {', '.join(known)}")
    return cls(**given)


def _parse_flags(words: Sequence[str]) -> dict[str, Any]:
    types = {f.name: str(f.type) for f in fields(SglangEplb)}
    found: dict[str, Any] = {}
    left = iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in types:
            continue
        if types[name] == "bool":
            found[name] = True
            continue
        text = value if equals else next(left, None)
        kind = types[name].split(" ")[0]
        try:
            if text is None:
                raise ValueError
            found[name] = {"int": int, "float": float, "str": str}[kind](text)
        except ValueError:
            raise ValueError(f"SGLang: {flag} is {text!r}; expected {kind}") from None
    return found


def _check_types(engine: str, settings: AscendEplb | VllmEplb | SglangEplb) -> None:
    """Refuse values of another type than the field's; JSON has no other."""
    kinds: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float)}
    for column in fields(settings):
        value, (kind, _, optional) = getattr(settings, column.name), str(column.type).partition(" ")
        allowed = kinds.get(kind, (str,))
        if (value is None and optional) or (
            isinstance(value, allowed) and (kind == "bool") == isinstance(value, bool)
        ):
            continue
        expected = "a string" if allowed == (str,) else kind
        raise ValueError(f"{engine}: {column.name} is {value!r}; expected {expected}")


def _check_integers(engine: str, settings: object, least: Mapping[str, int]) -> None:
    for name, low in least.items():
        value = getattr(settings, name)
        if value < low:
            raise ValueError(f"{engine}: {name} is {value!r}; expected an integer, {low} or more")


def _check_known(engine: str, settings: object, name: str, known: Collection[object]) -> None:
    value = getattr(settings, name)
    if value not in known:
        names = ", ".join(map(str, known))
        raise ValueError(f"{engine}: {name} is {value!r}; the known ones are: {names}")


def _read_map(name: str, path: str, format: PlacementFormat, deployment: Deployment) -> Placement:
    placement = read_placement(
        path,
        num_gpus=deployment.num_gpus,
        num_experts=deployment.num_experts,
        format=format,
        dense_layers=deployment.dense_layers if format is PlacementFormat.SGLANG else 0,
    )
    if placement.num_layers != deployment.num_layers:
        problem = f"{placement.num_layers} layers, and the deployment {deployment.num_layers}"
        raise ValueError(f"{name}: {path} has {problem}")
    return placement
