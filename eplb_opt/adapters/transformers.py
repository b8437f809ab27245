"""Record what the MoE blocks of a Hugging Face transformers model choose, as it runs.

Since transformers 5 the routed experts of a block are one module, ``experts``, which knows its
``num_experts`` and is called with the ids that the router chose, whatever the router does
(``integrations/moe.py``). So the ids are read there, and no router needs to be known.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_opt.adapters.tensors import to_array
from eplb_opt.errors import InvalidTokensError
from eplb_opt.recorder import Recorder

__all__ = ["record_model"]


@contextmanager
def record_model(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    append: bool = False,
    steps_per_file: int = 256,
) -> Iterator[Recorder]:
    """Record every forward pass of a model inside the context, each as one step.

    A pass of one token per sequence is a decode step, any other a prefill step. Tokens that a
    two-dimensional ``attention_mask`` hides are padding: scheduled, but counted nowhere. A pass
    that fails is left out. The hooks are gone when the context ends.

    Parameters
    ----------
    model
        A ``PreTrainedModel`` with MoE blocks, of transformers 5 or later: Mixtral, Qwen3-MoE,
        DeepSeek-V3, gpt-oss, and the like. It runs as before.
    folder, append, steps_per_file
        As for `Recorder`, which is what the context gives.

    Raises
    ------
    ValueError
        When the model has no such block, or blocks whose layers cannot be told apart, or with
        different numbers of experts.
    InvalidTokensError
        In a pass, when a block was left out, or called otherwise than above.
    """
    blocks = _blocks(model)
    num_experts = {block.num_experts for block in blocks.values()}
    if len(num_experts) > 1:
        raise ValueError(f"layers have {sorted(num_experts)} experts; a trace has one number")
    config = model.config
    recorder = Recorder(
        folder,
        num_experts.pop(),
        sorted(blocks),
        model=getattr(config, "name_or_path", "") or type(model).__name__,
        top_k=getattr(config, "num_experts_per_tok", None),
        append=append,
        steps_per_file=steps_per_file,
    )
    run = _Pass(recorder, inspect.signature(model.forward))
    hooks = [
        model.register_forward_pre_hook(run.begin, with_kwargs=True),
        model.register_forward_hook(run.end),
    ]
    for layer, block in blocks.items():
        hooks.append(block.register_forward_pre_hook(run.added(layer), with_kwargs=True))
    try:
        with recorder:
            yield recorder
    finally:
        for hook in hooks:
            hook.remove()


class _Pass:
    """One forward pass after another, seen by its hooks."""

    def __init__(self, recorder: Recorder, signature: inspect.Signature) -> None:
        self.recorder = recorder
        self._signature = signature
        self._decodes = False
        self._hidden: npt.NDArray[np.bool_] | None = None

    def begin(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._signature.bind_partial(*args, **kwargs).arguments
        given = {**given.get("kwargs", {}), **given}
        inputs = given.get("input_ids")
        inputs = given["inputs_embeds"] if inputs is None else inputs
        length = inputs.shape[1]
        mask = given.get("attention_mask")
        self._decodes = length == 1
        self._hidden = None
        if mask is not None and mask.ndim == 2:
            self._hidden = to_array(mask)[:, -length:].ravel() == 0
        self.recorder.begin_step()

    def end(self, *_: Any) -> None:
        self.recorder.end_step(stage="decode" if self._decodes else "prefill")

    def added(self, layer: int) -> Any:
        def add(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [*args, *kwargs.values()]
            ids = [value for value in given if _holds_ids(value)]
            if len(ids) != 1:
                problem = f"the experts were given {len(ids)} arguments that could be ids, not one"
                raise InvalidTokensError(f"layer {layer}: {problem}")
            self.recorder.add(layer, self._without_padding(layer, to_array(ids[0])))

        return add

    def _without_padding(self, layer: int, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self._hidden is None:
            return ids
        if len(ids) != self._hidden.size:
            problem = f"ids of {len(ids)} tokens; the attention mask has {self._hidden.size}"
            raise InvalidTokensError(f"layer {layer}: {problem}")
        return np.where(self._hidden[:, np.newaxis], -1, ids)


def _holds_ids(value: Any) -> bool:
    is_tensor = hasattr(value, "is_floating_point") and hasattr(value, "ndim")
    return is_tensor and value.ndim == 2 and not value.is_floating_point()


def _blocks(model: Any) -> dict[int, Any]:
    """Return the experts' module of each MoE layer, by the layer's number in the model."""
    blocks: dict[int, Any] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "experts" or not hasattr(module, "num_experts"):
            continue
        numbers = re.findall(r"\.([0-9]+)\.", name)
        if len(numbers) != 1 or int(numbers[0]) in blocks:
            raise ValueError(f"{name}: the layer of these experts is not clear")
        blocks[int(numbers[0])] = module
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no module called experts with num_experts, as the MoE "
            "blocks of transformers 5 have"
        )
    return blocks
