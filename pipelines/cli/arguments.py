"""Arguments that several commands share."""

import argparse
import re

from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.pipelines.convert.conversion_planning import LM_HEADS, ConversionOptions

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
DTYPES = ("bfloat16", "float32", "source")


def add_bucket_arguments(parser: argparse.ArgumentParser) -> None:
    """Who works on an output in a bucket, and who commits it."""
    parser.add_argument(
        "--take-over", action="store_true",
        help="take an output on gs:// from another process that is at work on it, without waiting until it is silent",
    )  # fmt: skip
    parser.add_argument(
        "--commit-in-job", action="store_true",
        help="let the job's last step commit, on gs://; always so with --template_location, where nobody waits",
    )  # fmt: skip


def byte_count(text: str) -> int:
    """A number of bytes: ``1073741824``, ``64MiB``, ``1G``.

    >>> byte_count("64MiB"), byte_count("1g"), byte_count("512")
    (67108864, 1073741824, 512)

    Raises:
      argparse.ArgumentTypeError: the text is not a number of bytes.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    count = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 1GiB, 512M or 67108864")
    return count


def positive_int(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def named_path(text: str) -> str:
    """A path or URL.

    Raises:
      argparse.ArgumentTypeError: it is empty, as a shell's variable that is not set is.
    """
    if not text:
        raise argparse.ArgumentTypeError("expected a path; found an empty one: is a variable not set?")
    return text


def add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that decide what the plan is."""
    parser.add_argument(
        "--source", required=True, metavar="PATH",
        help="a Hugging Face checkpoint: a folder, gs://bucket/path, hf://org/repo[@revision] or https://host/path/",
    )  # fmt: skip
    adapters = parser.add_mutually_exclusive_group()
    adapters.add_argument(
        "--lora", type=named_path, metavar="PATH",
        help="merge this PEFT adapter into the weights, in float32, on the way",
    )  # fmt: skip
    adapters.add_argument(
        "--lora-only", type=named_path, metavar="PATH",
        help="convert this PEFT adapter alone, for MaxText's lora_restore_path; of --source only config.json and names "
        "are read",
    )  # fmt: skip
    parser.add_argument("--family", default="auto", help="model family; auto (default) takes it from config.json")
    layers = parser.add_mutually_exclusive_group()
    layers.add_argument(
        "--scan-layers", dest="scan_layers", action="store_true", default=True,
        help="layers stacked in one array per block, as MaxText's scan_layers=true wants (default)",
    )  # fmt: skip
    layers.add_argument("--no-scan-layers", dest="scan_layers", action="store_false", help="arrays of each layer's own")
    parser.add_argument(
        "--dtype", choices=DTYPES,
        help="dtype of the weights (default bfloat16); source keeps what they have, the default with --lora-only",
    )  # fmt: skip
    parser.add_argument(
        "--vocab-size", type=positive_int, metavar="N", help="pad the vocabulary with zero rows up to N"
    )
    parser.add_argument(
        "--rope-lanes", default="auto", choices=("auto", "interleaved", "split"),
        help="order of rotary lanes of Llama blocks; auto follows config.json: interleaved for rope type llama3",
    )  # fmt: skip
    parser.add_argument("--multimodal", action="store_true", help="convert vision and audio towers too")
    parser.add_argument("--mtp", action="store_true", help="convert multi-token prediction layers too")
    parser.add_argument(
        "--match-maxtext", action="store_true",
        help="round where MaxText's own converter rounds, even where that is worse than necessary",
    )  # fmt: skip
    parser.add_argument(
        "--lm-head", default="auto", choices=LM_HEADS,
        help="a stored lm_head that config.json ties to the embedding: auto compares them and stops when they differ",
    )  # fmt: skip
    parser.add_argument(
        "--scale-layout", default="declared", choices=("declared", "broadcast"),
        help="with --dtype source: per-tensor scales as MaxText's FP8 models declare them, or of their weight's rank",
    )  # fmt: skip
    parser.add_argument(
        "--chunk-bytes", type=byte_count, default=64 << 20, metavar="BYTES",
        help="aim for one stored object (default 64MiB); never more than an eighth of --worker-memory-bytes",
    )  # fmt: skip
    parser.add_argument(
        "--worker-memory-bytes", type=byte_count, default=1 << 30, metavar="BYTES",
        help="bound on tensor bytes that one worker process holds at once (default 1GiB)",
    )  # fmt: skip


def conversion_options(args: argparse.Namespace) -> ConversionOptions:
    """The options that the arguments tell."""
    from tensorferry.pipelines.convert.conversion import absolute

    dtype = args.dtype or ("source" if args.lora_only else "bfloat16")
    return ConversionOptions(
        source=absolute(args.source),
        family=args.family,
        mapping=FamilyOptions(
            args.scan_layers, args.vocab_size, args.rope_lanes, args.multimodal, args.mtp, args.match_maxtext
        ),
        target=PlanOptions(args.scan_layers, dtype, args.chunk_bytes, args.worker_memory_bytes, args.scale_layout),
        lm_head=args.lm_head,
        lora_only=absolute(args.lora_only) if args.lora_only else "",
        lora=absolute(args.lora) if args.lora else "",
    )


def number_above_zero(text: str, most: float, called: str) -> float:
    """A number above zero and at most ``most``.

    Raises:
      argparse.ArgumentTypeError: it is none; ``called`` says what it should be.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {called}")
    return value
