"""Recording transformers models: tiny ones with random weights, of the families in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_opt.adapters.transformers import record_model
from eplb_opt.load_trace import LoadTrace
from eplb_opt.trace import read_trace

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("safetensors")

pytestmark = pytest.mark.filterwarnings("ignore")  # those of other packages

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "MixtralConfig": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    },
    "DeepseekV3Config": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def tiny(name: str) -> Any:
    """Make a model with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SMALL, **CONFIGS[name])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def read(folder: Path) -> LoadTrace:
    """Read a recording."""
    trace = read_trace(folder)
    assert isinstance(trace, LoadTrace)
    return trace


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_is_recorded_pass_by_pass(tmp_path: Path, name: str) -> None:
    """A prefill of 3 x 7 tokens, 3 of them padding, and four decodes of 3; nothing else changes."""
    model = tiny(name)
    prompt = torch.randint(2, 64, (3, 7))
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    alone = model.generate(input_ids=prompt, attention_mask=mask, **options)
    with record_model(model, tmp_path):
        recorded = model.generate(input_ids=prompt, attention_mask=mask, **options)
    assert torch.equal(alone, recorded)
    trace = read(tmp_path)
    k = CONFIGS[name]["num_experts_per_tok"]
    assert trace.facts.stage is not None
    assert trace.facts.scheduled is not None
    assert trace.facts.stage.tolist() == ["prefill"] + ["decode"] * 4
    assert trace.facts.scheduled.tolist() == [21, 3, 3, 3, 3]
    each = np.asarray(trace.tokens).sum(axis=2)
    assert each.tolist() == [[n * k] * trace.num_layers for n in (18, 3, 3, 3, 3)]
    assert trace.layer_ids == ((1, 2) if name == "DeepseekV3Config" else (0, 1, 2))
    assert (trace.top_k, trace.model) == (k, type(model).__name__)


def test_the_ids_are_the_routers_own(tmp_path: Path) -> None:
    """Counted from what Mixtral returns as router logits, for one pass."""
    model = tiny("MixtralConfig")
    prompt = torch.randint(2, 64, (2, 5))
    with record_model(model, tmp_path), torch.no_grad():
        out = model(prompt, output_router_logits=True)
    trace = read(tmp_path)
    for layer, logits in enumerate(out.router_logits):
        ids = logits.topk(2, dim=-1).indices.ravel()
        assert trace.tokens[0][layer].tolist() == torch.bincount(ids, minlength=8).tolist()


def test_a_failed_pass_is_left_out_and_hooks_are_removed(tmp_path: Path) -> None:
    """What was recorded before is kept, and later passes are not recorded."""
    model = tiny("Qwen3MoeConfig")
    prompt = torch.randint(2, 64, (2, 5))
    with record_model(model, tmp_path), torch.no_grad():
        model(prompt)
        block = model.model.layers[2].mlp
        forward = block.forward
        block.forward = None
        with pytest.raises(TypeError):
            model(prompt)
        block.forward = forward
        model(prompt)
    model(prompt)
    assert read(tmp_path).num_steps == 2
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    """A dense model has nothing to record."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL))
    with pytest.raises(ValueError, match="no module called experts"), record_model(model, tmp_path):
        pass
