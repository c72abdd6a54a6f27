"""The benchmark's own checkpoint: a random bf16 Qwen3-MoE of 0.5 B parameters, with the demo model's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
DEMO_MODEL: Final = ROOT / "deploy" / "models" / "tiny-moe"
SEED: Final = 0
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 640,
    "hidden_size": 1024,
    "intermediate_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 384,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 631,
    "eos_token_id": 633,
    "pad_token_id": 631,
}
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def random_model(folder: Path) -> Path:
    """Writes the checkpoint to `folder`, unless it is there already, and returns that."""
    recipe = json.dumps({"seed": SEED, **SIZES})
    stamp = folder / "recipe.json"  # written last, so half a checkpoint is made again
    if stamp.is_file() and stamp.read_text() == recipe:
        return folder
    import torch  # only here: what the benchmark itself holds of torch would be on the cores of those it measures
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(SEED)
    folder.mkdir(parents=True, exist_ok=True)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, dtype=torch.bfloat16)).to(torch.bfloat16)
    model.save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / name, folder / name)
    stamp.write_text(recipe)
    return folder


def weight_bytes(folder: Path) -> int:
    """What the checkpoint's tensors take on disk, and so in memory in its own dtype."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
