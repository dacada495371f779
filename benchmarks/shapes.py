"""Sizes and tensor names of a synthetic checkpoint: Llama-3.1-8B with fewer layers and a cut vocabulary."""

import math
from dataclasses import dataclass, replace

SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class LlamaShapes:
    """The sizes that config.json states, and the tensors that follow from them.

    Attributes:
      fp8_block: side in elements of the square blocks that share a scale; ``None``: every weight is bfloat16.
    """

    layers: int
    vocab: int = 65536
    embed: int = 4096
    mlp: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    fp8_block: int | None = None

    @classmethod
    def of_size(cls, gigabytes: float, fp8_block: int | None = None) -> "LlamaShapes":
        """The shapes whose checkpoint is closest to ``gigabytes`` (1e9 bytes), with one layer at least."""
        empty = cls(layers=0, vocab=65536 if gigabytes >= 2 else 8192, fp8_block=fp8_block)
        layer_bytes = replace(empty, layers=1).nbytes - empty.nbytes
        return replace(empty, layers=max(1, round((gigabytes * 1e9 - empty.nbytes) / layer_bytes)))

    def tiny(self) -> "LlamaShapes":
        """As many layers and tensors, with next to no bytes: what it costs to convert is start-up."""
        return replace(self, vocab=256, embed=128, mlp=256, heads=4, kv_heads=2, head_dim=32)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in self.tensors().values())

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name to safetensors dtype and shape, in the order in which they are stored."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            "model.embed_tokens.weight": ("BF16", (self.vocab, self.embed))
        }
        for layer in range(self.layers):
            found |= self._layer(f"model.layers.{layer}.")
        return found | {
            "model.norm.weight": ("BF16", (self.embed,)),
            "lm_head.weight": ("BF16", (self.vocab, self.embed)),
        }

    def _layer(self, prefix: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projections = {
            "self_attn.q_proj": (queries, self.embed),
            "self_attn.k_proj": (keys, self.embed),
            "self_attn.v_proj": (keys, self.embed),
            "self_attn.o_proj": (self.embed, queries),
            "mlp.gate_proj": (self.mlp, self.embed),
            "mlp.up_proj": (self.mlp, self.embed),
            "mlp.down_proj": (self.embed, self.mlp),
        }
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, shape in projections.items():
            found |= self._projection(f"{prefix}{name}.weight", shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{norm}.weight"] = ("BF16", (self.embed,))
        return found

    def _projection(self, name: str, shape: tuple[int, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        if self.fp8_block is None:
            return {name: ("BF16", shape)}
        blocks = tuple(-(-size // self.fp8_block) for size in shape)
        return {name: ("F8_E4M3", shape), name + SCALE_SUFFIX: ("F32", blocks)}

    def config(self) -> dict:
        """The content of config.json."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.embed,
            "initializer_range": 0.02,
            "intermediate_size": self.mlp,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.43.0",
            "use_cache": True,
            "vocab_size": self.vocab,
        }
        if self.fp8_block:
            config["quantization_config"] = {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "modules_to_not_convert": ["lm_head"],
                "quant_method": "fp8",
                "weight_block_size": [self.fp8_block, self.fp8_block],
            }
        return config


ITEM_BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
