"""A Llama-shaped GGUF file, read as a Hugging Face checkpoint's tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def hf_name(gguf_name: str) -> str:
    """``blk.7.attn_q.weight`` -> ``model.layers.7.self_attn.q_proj.weight``.

    Raises:
      KeyError: for a tensor that a Llama block does not have.
    """
    match gguf_name.split("."):
        case ["blk", layer, part, suffix]:
            return f"model.layers.{layer}.{BLOCK[part]}.{suffix}"
        case [part, suffix]:
            return f"{TOP[part]}.{suffix}"
    raise KeyError(gguf_name)


def half_split_lanes(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorders q or k rows from GGUF's lanes to Hugging Face's, head by head.

    Args:
      rows: ``[(heads pair half), embed]``: the two lanes that rotate together are neighbours.
      heads: how many heads the rows hold.

    Returns:
      ``[(heads half pair), embed]``: the two lanes are half a head apart.
    """
    by_pair = rows.reshape(heads, -1, 2, rows.shape[1])
    return by_pair.swapaxes(1, 2).reshape(rows.shape)


@dataclass(frozen=True)
class GgufLlama:
    """A GGUF file of architecture ``llama``, opened by mapping it into memory."""

    reader: GGUFReader

    @classmethod
    def open(cls, path: Path) -> "GgufLlama":
        return cls(GGUFReader(path))

    def setting(self, key: str) -> Any:
        """The value of a metadata key, as Python data."""
        return self.reader.fields[key].contents()

    def nbytes_bf16(self) -> dict[str, int]:
        """Bytes of each tensor as bfloat16, by Hugging Face name, in file order."""
        return {hf_name(tensor.name): 2 * int(tensor.n_elements) for tensor in self.reader.tensors}

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields ``(Hugging Face name, bfloat16 array)`` in file order, one tensor in memory at a time."""
        for tensor in self.reader.tensors:
            yield hf_name(tensor.name), self._values(tensor).astype(BFLOAT16)

    def _values(self, tensor: ReaderTensor) -> np.ndarray:
        values = dequantize(tensor.data, tensor.tensor_type)
        heads = self._rotated_heads(tensor.name)
        return half_split_lanes(values, heads) if heads else values

    def _rotated_heads(self, gguf_name: str) -> int:
        if gguf_name.endswith(".attn_q.weight"):
            return self.setting("llama.attention.head_count")
        if gguf_name.endswith(".attn_k.weight"):
            return self.setting("llama.attention.head_count_kv")
        return 0
