"""Record which experts a model's tokens choose, and what an engine's EPLB would see of it.

Tiny models with random weights, of three families, generate some text in Hugging Face transformers
(`pip install transformers torch "eplb-opt[files]"`). Every forward pass is a step of the recording;
`CollectThenDecide` then collects the decode steps as vLLM-Ascend does, and says when it decides.
"""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

import numpy as np

import eplb_opt as eo
from eplb_opt.adapters.transformers import record_model

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 32, 40

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "MixtralConfig": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": {"num_experts": 32, "num_experts_per_tok": 4, "head_dim": 16},
    "DeepseekV3Config": {
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
}


def main() -> None:
    """Record each family, and read the recordings back."""
    try:
        torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    except ImportError as error:
        print(f"this example needs PyTorch and transformers: {error}")
        return
    for name, sizes in FAMILIES.items():
        torch.manual_seed(0)
        config = getattr(transformers, name)(**SMALL, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        prompts = torch.randint(0, SMALL["vocab_size"], (PROMPTS, PROMPT_TOKENS))
        with tempfile.TemporaryDirectory() as folder:
            with record_model(model, folder):
                model.generate(prompts, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
            trace = eo.read_trace(folder)
            assert isinstance(trace, eo.LoadTrace)
            show(trace)


def show(trace: eo.LoadTrace) -> None:
    """Print what was recorded, and feed it to an engine's heat collection."""
    stage, scheduled = trace.facts.stage, trace.facts.scheduled
    assert stage is not None
    assert scheduled is not None
    print(
        f"{trace.model}: layers {trace.layer_ids}, {(stage == 'prefill').sum()} prefill and "
        f"{(stage == 'decode').sum()} decode steps"
    )
    decodes = eo.StageFilter("decode", most_decode_tokens=PROMPTS)
    heat = eo.CollectThenDecide(collection_interval=20, algorithm_interval=5, collect=decodes)
    for number, (tokens, run) in enumerate(zip(trace.tokens, scheduled.tolist(), strict=True)):
        step = heat.step(tokens, run)
        if step.load is not None:
            hottest = step.load.max(axis=1) / step.load.mean(axis=1)
            print(f"  step {number}: decides; hottest expert over mean {np.round(hottest, 2)}")
        for layer in step.committed:
            print(f"  step {number}: layer {layer} has its new placement")


if __name__ == "__main__":
    main()
