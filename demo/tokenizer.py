"""The byte-level BPE tokenizer of SmolLM2, from GGUF metadata to Hugging Face's tokenizer files."""

import json
from pathlib import Path

from demo.gguf_llama import GgufLlama

CONTROL = 3  # GGUF's token type of <|im_start|> and its like
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def write_tokenizer(directory: Path, gguf: GgufLlama) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``."""
    _write(directory / "tokenizer.json", tokenizer(gguf))
    _write(directory / "tokenizer_config.json", tokenizer_config(gguf))


def tokenizer(gguf: GgufLlama) -> dict:
    """The content of ``tokenizer.json``.

    Raises:
      ValueError: for a pre-tokenizer other than SmolLM's, which this file would get wrong without a sign.
    """
    if (kind := gguf.setting("tokenizer.ggml.pre")) != "smollm":
        raise ValueError(f"the GGUF file's pre-tokenizer is {kind!r}; only 'smollm' is known here")
    tokens = gguf.setting("tokenizer.ggml.tokens")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, gguf.setting("tokenizer.ggml.token_type")),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
        },
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": gguf.setting("tokenizer.ggml.merges"),
        },
    }


def tokenizer_config(gguf: GgufLlama) -> dict:
    """The content of ``tokenizer_config.json``."""
    tokens = gguf.setting("tokenizer.ggml.tokens")

    def token(role: str) -> str:
        return tokens[gguf.setting(f"tokenizer.ggml.{role}_token_id")]

    return {
        "add_prefix_space": False,
        "bos_token": token("bos"),
        "chat_template": gguf.setting("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "eos_token": token("eos"),
        "model_max_length": gguf.setting("llama.context_length"),
        "pad_token": token("padding"),
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": token("unknown"),
    }


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    control = [number for number, kind in enumerate(types) if kind == CONTROL]
    return [{"id": number, "content": tokens[number], **plain} for number in control]


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
