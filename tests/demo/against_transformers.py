"""Compares a checkpoint with transformers' own reading of the GGUF it was made from.

Run by an interpreter that has torch, transformers, accelerate and gguf.

Usage: ``python against_transformers.py CHECKPOINT GGUF``. Prints one JSON line of findings.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "The capital of France is"
TEXTS = [
    PROMPT,
    " I'm 1234 years\n\told, <|im_start|>user\nhélas 日本<|im_end|>",
    "def f(x):\n    return x**2  # 3.14",
]


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names whose values differ after a cast to bfloat16, or that only one side has."""
    both = ours.keys() & theirs.keys()
    different = [name for name in both if not torch.equal(ours[name], theirs[name].to(torch.bfloat16))]
    return sorted(different) + sorted(ours.keys() ^ theirs.keys())


def main() -> None:
    checkpoint, gguf = Path(sys.argv[1]), Path(sys.argv[2])
    from_gguf = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(**from_gguf, dtype=torch.float32)
    tokenizer, their_tokenizer = (
        AutoTokenizer.from_pretrained(checkpoint),
        AutoTokenizer.from_pretrained(**from_gguf),
    )
    prompt = tokenizer(PROMPT, return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    chat = [{"role": "user", "content": "Hello"}]
    findings = {
        "tensors": len(theirs.state_dict()),
        "differing": differing(model.state_dict(), theirs.state_dict()),
        "next_word": tokenizer.decode(written[0, prompt["input_ids"].shape[1] :]),
        "ids": [tokenizer(text)["input_ids"] for text in TEXTS],
        "their_ids": [their_tokenizer(text)["input_ids"] for text in TEXTS],
        "round_trip": [tokenizer.decode(tokenizer(text)["input_ids"]) == text for text in TEXTS],
        "chat": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
    }
    print(json.dumps(findings))


if __name__ == "__main__":
    main()
