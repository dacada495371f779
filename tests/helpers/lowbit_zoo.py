"""A small checkpoint of every low-bit scheme, with its weights computed one element at a time from the specs.

Nothing here uses the package: codes are decoded from their bits, scales looked up by integer division.
"""

import json
from dataclasses import dataclass, field

import numpy as np

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def float_bits(byte, exponent_bits, mantissa_bits, bias, fnuz=False, ieee=False):
    """A small float from its bits, per the OCP 8-bit specification (or the FNUZ variant)."""
    byte = int(byte)
    sign = -1.0 if byte >> 7 else 1.0
    exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = byte & ((1 << mantissa_bits) - 1)
    top = (1 << exponent_bits) - 1
    if fnuz and byte == 0x80:
        return float("nan")
    if not fnuz and not ieee and byte & 0x7F == 0x7F:
        return float("nan")
    if ieee and exponent == top:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


FP8 = {
    "float8_e4m3fn": lambda b: float_bits(b, 4, 3, 7),
    "float8_e5m2": lambda b: float_bits(b, 5, 2, 15, ieee=True),
    "float8_e4m3fnuz": lambda b: float_bits(b, 4, 3, 8, fnuz=True),
    "float8_e5m2fnuz": lambda b: float_bits(b, 5, 2, 16, fnuz=True),
}


def e2m1(nibble):
    nibble = int(nibble)
    return -E2M1[nibble & 7] if nibble & 8 else E2M1[nibble & 7]


def e8m0(byte):
    return 2.0 ** (int(byte) - 127)


@dataclass
class Repo:
    """Stored arrays with the dtype names of their headers, the config, and what the weights are."""

    arrays: dict[str, tuple[str, np.ndarray]]
    config: dict
    name: str
    scheme: str
    expected: np.ndarray
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


def rng(seed=7):
    return np.random.default_rng(seed)


def fp8_codes(shape, dtype, seed=1):
    """Random codes without NaN and infinities."""
    good = np.array([b for b in range(256) if np.isfinite(FP8[dtype](b))], np.uint8)
    return rng(seed).choice(good, shape)


def scales(shape, seed=2):
    return (rng(seed).random(shape) * 0.02 + 0.001).astype(np.float32)


def f32(x):
    return np.float32(x)


def each(shape, value):
    """An array by a function of its index, one element at a time, in float32."""
    out = np.empty(shape, np.float32)
    for index in np.ndindex(*shape):
        out[index] = value(*index)
    return out


def block_fp8(rows=9, columns=13, block=(4, 5), dtype="float8_e4m3fn", scale_dtype="float32", alias="weight_scale_inv"):
    codes = fp8_codes((rows, columns), dtype)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    if scale_dtype in ("float8_e8m0fnu", "uint8"):
        stored = rng(3).integers(118, 128, grid).astype(np.uint8)
        scale = each(grid, lambda i, j: e8m0(stored[i, j]))
    elif scale_dtype == "bfloat16":
        import ml_dtypes

        stored = scales(grid).astype(ml_dtypes.bfloat16)
        scale = stored.astype(np.float32)
    else:
        stored = scale = scales(grid)
    expected = each((rows, columns), lambda i, j: f32(FP8[dtype](codes[i, j])) * scale[i // block[0], j // block[1]])
    arrays = {"a.weight": (dtype, codes), f"a.{alias}": (scale_dtype, stored)}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3"}}
    return Repo(arrays, config, "a.weight", "fp8-block", expected)


def tensor_fp8(shape=(5, 7), scale_shape=(), dtype="float8_e4m3fn", alias="weight_scale"):
    codes = fp8_codes(shape, dtype)
    scale = scales(scale_shape)
    expected = each(shape, lambda *i: f32(FP8[dtype](codes[i])) * scale.reshape(-1)[0])
    arrays = {
        "a.weight": (dtype, codes),
        f"a.{alias}": ("float32", scale),
        "a.input_scale": ("float32", scales(())),
    }
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    return Repo(arrays, config, "a.weight", "fp8-tensor", expected)


def channel_fp8(scale_shape=(5, 1)):
    codes, scale = fp8_codes((5, 7), "float8_e4m3fn"), scales(scale_shape)
    expected = each((5, 7), lambda i, j: f32(FP8["float8_e4m3fn"](codes[i, j])) * scale.reshape(-1)[i])
    arrays = {"a.weight": ("float8_e4m3fn", codes), "a.weight_scale": ("float32", scale)}
    return Repo(arrays, {"quantization_config": {"quant_method": "fbgemm_fp8"}}, "a.weight", "fp8-channel", expected)


def compressed(weights, form="float-quantized", **more):
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "symmetric": True, **weights}}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "frozen",
            "config_groups": {"group_0": group},
            **more,
        }
    }


def group_fp8(zero=False):
    codes, scale = fp8_codes((5, 14), "float8_e4m3fn"), scales((5, 4))
    zeros = np.round(rng(9).random((5, 4)) * 6 - 3).astype(np.int8)
    expected = each(
        (5, 14),
        lambda i, j: (
            (f32(FP8["float8_e4m3fn"](codes[i, j])) - (f32(zeros[i, j // 4]) if zero else f32(0))) * scale[i, j // 4]
        ),
    )
    arrays = {"a.weight": ("float8_e4m3fn", codes), "a.weight_scale": ("float32", scale)}
    if zero:
        arrays["a.weight_zero_point"] = ("int8", zeros)
    config = compressed({"strategy": "group", "group_size": 4})
    return Repo(arrays, config, "a.weight", "fp8-group", expected)


def parts_fp8():
    """Fused query/key/value rows, 6 + 2 + 2, a scale each."""
    codes, scale = fp8_codes((10, 7), "float8_e4m3fn"), scales((3,))
    part = [0] * 6 + [1] * 2 + [2] * 2
    expected = each((10, 7), lambda i, j: f32(FP8["float8_e4m3fn"](codes[i, j])) * scale[part[i]])
    arrays = {"a.qkv_proj.weight": ("float8_e4m3fn", codes), "a.qkv_proj.weight_scale": ("float32", scale)}
    config = {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "quantization_config": {"quant_method": "fp8"},
    }
    return Repo(arrays, config, "a.qkv_proj.weight", "fp8-parts", expected)


def expert_fp8(scale_shape=(3, 1, 7)):
    codes, scale = fp8_codes((3, 5, 7), "float8_e4m3fn"), scales(scale_shape)
    wide = scale.reshape(scale_shape + (1,) * (3 - len(scale_shape)))
    whole = np.broadcast_to(wide, (3, 5, 7))
    expected = each((3, 5, 7), lambda *i: f32(FP8["float8_e4m3fn"](codes[i])) * whole[i])
    arrays = {
        "experts.gate_up_proj": ("float8_e4m3fn", codes),
        "experts.gate_up_proj_scale": ("float32", scale),
    }
    kind = "fp8-channel" if scale.size > 3 else "fp8-expert"
    return Repo(arrays, {}, "experts.gate_up_proj", kind, expected)


def expert_block_fp8():
    """Experts stacked in one parameter, a grid of blocks each."""
    codes, scale = fp8_codes((3, 9, 13), "float8_e4m3fn"), scales((3, 3, 3))
    expected = each(
        (3, 9, 13),
        lambda e, i, j: f32(FP8["float8_e4m3fn"](codes[e, i, j])) * scale[e, i // 4, j // 5],
    )
    arrays = {"experts.up": ("float8_e4m3fn", codes), "experts.up_scale_inv": ("float32", scale)}
    config = {"text_config": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 5]}}}
    return Repo(arrays, config, "experts.up", "fp8-block", expected)


def expert_parts_fp8():
    """Gate and up rows of every expert, a scale each."""
    codes, scale = fp8_codes((3, 6, 7), "float8_e4m3fn"), scales((3, 2))
    expected = each((3, 6, 7), lambda e, i, j: f32(FP8["float8_e4m3fn"](codes[e, i, j])) * scale[e, i // 3])
    arrays = {"e.w13_weight": ("float8_e4m3fn", codes), "e.w13_weight_scale": ("float32", scale)}
    return Repo(arrays, {}, "e.w13_weight", "fp8-parts", expected)


def modelopt_blocks():
    """FP8_PB_WO: blocks of 128, the grid stored as [rows, 1, columns, 1]."""
    codes, scale = fp8_codes((130, 257), "float8_e4m3fn"), scales((2, 3))
    expected = each((130, 257), lambda i, j: f32(FP8["float8_e4m3fn"](codes[i, j])) * scale[i // 128, j // 128])
    arrays = {"a.weight": ("float8_e4m3fn", codes), "a.weight_scale": ("float32", scale[:, None, :, None])}
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}}
    return Repo(arrays, config, "a.weight", "fp8-block", expected)


def mxfp8(columns=70):
    codes = fp8_codes((5, columns), "float8_e4m3fn")
    stored = rng(3).integers(118, 128, (5, -(-columns // 32))).astype(np.uint8)
    expected = each((5, columns), lambda i, j: f32(FP8["float8_e4m3fn"](codes[i, j])) * f32(e8m0(stored[i, j // 32])))
    arrays = {"a.weight": ("float8_e4m3fn", codes), "a.weight_scale_inv": ("uint8", stored)}
    return Repo(arrays, {"quantization_config": {"quant_method": "mxfp8"}}, "a.weight", "mxfp8", expected)


def int8_channel():
    codes, scale = rng().integers(-128, 128, (5, 7)).astype(np.int8), scales((5, 1))
    expected = each((5, 7), lambda i, j: f32(codes[i, j]) * scale[i, 0])
    arrays = {"a.weight": ("int8", codes), "a.weight_scale": ("float32", scale)}
    config = compressed({"type": "int", "strategy": "channel"}, "int-quantized")
    return Repo(arrays, config, "a.weight", "int8", expected)


def nibbles(packed):
    """[..., bytes] to [..., 2 * bytes], low nibble first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def mxfp4(values_dtype="uint8", scale_dtype="uint8", names=("weight_packed", "weight_scale"), config=None):
    packed = rng().integers(0, 256, (3, 48)).astype(np.uint8)
    stored = rng(3).integers(118, 128, (3, 3)).astype(np.uint8)
    codes = nibbles(packed)
    expected = each((3, 96), lambda i, j: f32(e2m1(codes[i, j])) * f32(e8m0(stored[i, j // 32])))
    arrays = {
        f"a.{names[0]}": (values_dtype, packed.view(np.int8) if values_dtype == "int8" else packed),
        f"a.{names[1]}": (scale_dtype, stored),
    }
    shapes = {f"a.{names[0]}": (3, 96)} if values_dtype == "float4_e2m1fn" else {}
    config = compressed({"num_bits": 4, "strategy": "group", "group_size": 32}) if config is None else config
    return Repo(arrays, config, "a.weight", "mxfp4", expected, shapes)


def fused_mxfp4():
    packed = rng().integers(0, 256, (2, 3, 32)).astype(np.uint8)
    stored = rng(3).integers(118, 128, (2, 3, 2)).astype(np.uint8)
    codes = nibbles(packed)
    expected = each((2, 3, 64), lambda e, i, j: f32(e2m1(codes[e, i, j])) * f32(e8m0(stored[e, i, j // 32])))
    arrays = {"e.w13_weight": ("uint8", packed), "e.w13_weight_scale": ("uint8", stored)}
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    return Repo(arrays, config, "e.w13_weight", "mxfp4", expected)


def gpt_oss(experts=2, outputs=5, groups=3):
    """[experts, outputs, groups, 16] in the file; [experts, inputs, outputs] to a mapping."""
    blocks = rng().integers(0, 256, (experts, outputs, groups, 16)).astype(np.uint8)
    stored = rng(3).integers(118, 128, (experts, outputs, groups)).astype(np.uint8)

    def value(e, i, o):
        byte = blocks[e, o, i // 32, i % 32 // 2]
        nibble = byte >> 4 if i % 2 else byte & 15
        return f32(e2m1(nibble)) * f32(e8m0(stored[e, o, i // 32]))

    arrays = {
        "experts.gate_up_proj_blocks": ("uint8", blocks),
        "experts.gate_up_proj_scales": ("uint8", stored),
    }
    config = {"quantization_config": {"quant_method": "gpt_oss_mxfp4"}}
    return Repo(arrays, config, "experts.gate_up_proj", "mxfp4-blocks", each((experts, 32 * groups, outputs), value))


def nvfp4(convention="modelopt", factor=0.25, experts=0):
    import ml_dtypes

    shape = (experts, 3, 24) if experts else (3, 24)
    packed = rng().integers(0, 256, shape).astype(np.uint8)
    stored = rng(3).choice(np.arange(1, 127, dtype=np.uint8), (*shape[:-1], 3))
    codes = nibbles(packed)
    count = max(experts, 1)
    factors = np.array([factor * (k + 1) for k in range(count)], np.float32)

    def value(*index):
        ws = f32(FP8["float8_e4m3fn"](stored[(*index[:-1], index[-1] // 16)]))
        g = factors[index[0] if experts else 0]
        combined = ws * g if convention == "modelopt" else ws / g
        return f32(e2m1(codes[index])) * combined

    expected = each((*shape[:-1], 48), value)
    scale = stored.view(ml_dtypes.float8_e4m3fn)
    if convention == "modelopt":
        names = ("a.weight", "a.weight_scale_2")
        config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}}
    else:
        names = ("a.weight_packed", "a.weight_global_scale")
        config = compressed({"num_bits": 4, "strategy": "tensor_group", "group_size": 16}, "nvfp4-pack-quantized")
    arrays = {
        names[0]: ("uint8", packed),
        "a.weight_scale": ("float8_e4m3fn", scale),
        names[1]: ("float32", factors.reshape((count,))),
        "a.input_scale": ("float32", scales(())),
    }
    return Repo(arrays, config, "a.weight", "nvfp4", expected)


def stream(values, bits):
    """Integers to int32 words, one little-endian bit stream per row, bit by bit."""
    rows, count = values.shape
    words = np.zeros((rows, -(-count * bits // 32)), np.uint32)
    for r in range(rows):
        number = 0
        for k in range(count):
            number |= int(values[r, k]) << (k * bits)
        for w in range(words.shape[1]):
            words[r, w] = (number >> (32 * w)) & 0xFFFFFFFF
    return words.view(np.int32)


def whole_words(values, bits):
    """Integers to int32 words, as many whole ones in each as there is room for, the lowest bits first."""
    rows, count = values.shape
    per_word = 32 // bits
    words = np.zeros((rows, -(-count // per_word)), np.uint32)
    for r in range(rows):
        for k in range(count):
            words[r, k // per_word] |= np.uint32(int(values[r, k]) << (k % per_word * bits))
    return words.view(np.int32)


def pack_quantized(bits=4, rows=5, columns=48, group=16, zero=False, act_order=False, channel=False, pack=stream):
    import ml_dtypes

    half = 1 << (bits - 1)
    q = rng(bits).integers(0, 2 * half, (rows, columns))
    groups = 1 if channel else -(-columns // group)
    scale = scales((rows, groups)).astype(ml_dtypes.bfloat16)
    zeros = rng(4).integers(0, 2 * half, (rows, groups)) if zero else np.full((rows, groups), half)
    index = rng(5).integers(0, groups, columns) if act_order else np.arange(columns) // group
    index = index * 0 if channel else index
    s32 = scale.astype(np.float32)
    expected = each(
        (rows, columns),
        lambda o, i: (f32(int(q[o, i]) - half) - f32(int(zeros[o, index[i]]) - half)) * s32[o, index[i]],
    )
    arrays = {
        "a.weight_packed": ("int32", pack(q, bits)),
        "a.weight_scale": ("bfloat16", scale),
        "a.weight_shape": ("int64", np.array([rows, columns], np.int64)),
    }
    if zero:
        arrays["a.weight_zero_point"] = ("int32", np.ascontiguousarray(pack(zeros.T, bits).T))
    if act_order:
        arrays["a.weight_g_idx"] = ("int32", index.astype(np.int32))
    weights = {"num_bits": bits, "type": "int", "strategy": "channel" if channel else "group", "symmetric": not zero}
    if not channel:
        weights["group_size"] = group
    return Repo(arrays, compressed(weights, "pack-quantized"), "a.weight", "int-packed", expected)


def gptq(bits=4, version="gptq", zeros="symmetric", act_order=False, stored_version=None, rows=32, columns=96):
    group = 32
    groups = columns // group
    q = rng(bits).integers(0, 1 << bits, (rows, columns))
    scale = scales((groups, rows)).astype(np.float16)
    middle = 1 << (bits - 1)
    true_zeros = (
        np.full((groups, rows), middle) if zeros == "symmetric" else rng(6).integers(1, 1 << bits, (groups, rows))
    )
    plus = 0 if (stored_version or version) == "gptq_v2" else 1
    index = rng(5).permutation(np.arange(columns) // group) if act_order else np.arange(columns) // group
    expected = each(
        (rows, columns),
        lambda o, i: f32(int(q[o, i]) - int(true_zeros[index[i], o])) * f32(scale[index[i], o]),
    )
    arrays = {
        "a.qweight": ("int32", np.ascontiguousarray(stream(q, bits).T)),
        "a.qzeros": ("int32", stream(true_zeros - plus, bits)),
        "a.scales": ("float16", scale),
        "a.g_idx": ("int32", index.astype(np.int32)),
    }
    config = {
        "quantization_config": {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "desc_act": act_order,
            "sym": zeros == "symmetric",
            "checkpoint_format": version,
        }
    }
    return Repo(arrays, config, "a.weight", "gptq", expected)


def awq(outputs=24, inputs=10, group=4):
    groups = -(-inputs // group)
    q = rng().integers(0, 16, (inputs, outputs))
    zeros = rng(3).integers(0, 16, (groups, outputs))
    scale = scales((groups, outputs)).astype(np.float16)

    def pack(values):
        words = np.zeros((values.shape[0], outputs // 8), np.uint32)
        for r, w in np.ndindex(*words.shape):
            for position, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                words[r, w] |= np.uint32(int(values[r, 8 * w + column]) << (4 * position))
        return words.view(np.int32)

    expected = each(
        (outputs, inputs),
        lambda o, i: f32(int(q[i, o]) - int(zeros[i // group, o])) * f32(scale[i // group, o]),
    )
    arrays = {"a.qweight": ("int32", pack(q)), "a.qzeros": ("int32", pack(zeros)), "a.scales": ("float16", scale)}
    config = {
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
        }
    }
    return Repo(arrays, config, "a.weight", "awq", expected)


def bnb4(kind="nf4", nested=True, shape=(7, 9)):
    count, block, nested_block, plus = shape[0] * shape[1], 8, 4, 0.125
    nibble = rng().integers(0, 16, count + count % 2)
    packed = (nibble[0::2] << 4 | nibble[1::2]).astype(np.uint8)
    table = np.sort(rng(2).random(16) * 2 - 1).astype(np.float32)
    blocks = -(-count // block)
    state = {"shape": list(shape), "dtype": "bfloat16", "blocksize": block}
    arrays = {"a.weight": ("uint8", packed[:, None]), "a.weight.quant_map": ("float32", table)}
    if nested:
        codes = rng(3).integers(0, 256, blocks).astype(np.uint8)
        nested_map = rng(4).random(256).astype(np.float32)
        nested_absmax = scales((-(-blocks // nested_block),))
        absmax = [nested_map[codes[k]] * nested_absmax[k // nested_block] + f32(plus) for k in range(blocks)]
        state |= {"nested_blocksize": nested_block, "nested_offset": plus, "nested_dtype": "float32"}
        arrays["a.weight.absmax"] = ("uint8", codes)
        arrays["a.weight.nested_absmax"] = ("float32", nested_absmax)
        arrays["a.weight.nested_quant_map"] = ("float32", nested_map)
    else:
        absmax = scales((blocks,))
        arrays["a.weight.absmax"] = ("float32", absmax)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    arrays[f"a.weight.quant_state.bitsandbytes__{kind}"] = ("uint8", text)
    expected = each(shape, lambda i, j: table[nibble[i * shape[1] + j]] * absmax[(i * shape[1] + j) // block])
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    return Repo(arrays, config, "a.weight", f"bnb-{kind}", expected)


def bnb_int8():
    codes, scb = rng().integers(-127, 128, (5, 7)).astype(np.int8), scales((5,)) * 1000
    expected = each((5, 7), lambda i, j: f32(codes[i, j]) * scb[i] / f32(127))
    arrays = {
        "a.weight": ("int8", codes),
        "a.SCB": ("float32", scb),
        "a.weight_format": ("uint8", np.zeros((), np.uint8)),
    }
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    return Repo(arrays, config, "a.weight", "bnb-int8", expected)


DEEPSEEK_V4 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}}
QUARK4 = {
    "quantization_config": {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
    }
}

ZOO = {
    "block": block_fp8,
    "block bf16 scale": lambda: block_fp8(scale_dtype="bfloat16"),
    "block e8m0 .scale": lambda: block_fp8(scale_dtype="float8_e8m0fnu", alias="scale"),
    "block u8": lambda: block_fp8(scale_dtype="uint8"),
    "block e5m2": lambda: block_fp8(dtype="float8_e5m2"),
    "block fnuz": lambda: block_fp8(dtype="float8_e4m3fnuz"),
    "block e5m2fnuz": lambda: block_fp8(dtype="float8_e5m2fnuz"),
    "tensor": tensor_fp8,
    "tensor [1]": lambda: tensor_fp8(scale_shape=(1,), alias="qscale_weight"),
    "tensor 1-d weight": lambda: tensor_fp8(shape=(11,)),
    "channel [O,1]": channel_fp8,
    "channel [O]": lambda: channel_fp8((5,)),
    "group": group_fp8,
    "group with zero points": lambda: group_fp8(zero=True),
    "fused parts": parts_fp8,
    "experts [E,1,F]": expert_fp8,
    "experts [E,I]": lambda: expert_fp8((3, 5)),
    "experts [E]": lambda: expert_fp8((3,)),
    "experts in blocks": expert_block_fp8,
    "experts in parts": expert_parts_fp8,
    "block 4-d grid": modelopt_blocks,
    "mxfp8": mxfp8,
    "int8": int8_channel,
    "mxfp4 packed": mxfp4,
    "mxfp4 deepseek": lambda: mxfp4("int8", "float8_e8m0fnu", ("weight", "scale"), DEEPSEEK_V4),
    "mxfp4 quark": lambda: mxfp4(names=("weight", "weight_scale"), config=QUARK4),
    "mxfp4 F4": lambda: mxfp4("float4_e2m1fn", "float8_e8m0fnu", ("weight", "weight_scale"), {}),
    "mxfp4 fused": fused_mxfp4,
    "mxfp4 gpt-oss": gpt_oss,
    "nvfp4 modelopt": nvfp4,
    "nvfp4 compressed": lambda: nvfp4("compressed", 4.0),
    "nvfp4 experts": lambda: nvfp4(experts=2),
    **{f"int{b}": lambda b=b: pack_quantized(b, columns=96) for b in range(2, 9)},
    **{f"int{b} in whole words": lambda b=b: pack_quantized(b, columns=96, pack=whole_words) for b in (3, 5, 6, 7)},
    "int3 in whole words, ragged": lambda: pack_quantized(3, rows=23, columns=41, group=8, zero=True, pack=whole_words),
    "int4 ragged": lambda: pack_quantized(columns=45, group=16),
    "int3 ragged": lambda: pack_quantized(3, columns=41, group=8),
    "int4 zero points": lambda: pack_quantized(rows=11, zero=True),
    "int6 zero points": lambda: pack_quantized(6, rows=11, zero=True),
    "int4 act order": lambda: pack_quantized(zero=True, act_order=True),
    "int8 channel words": lambda: pack_quantized(8, channel=True),
    **{f"gptq {b}": lambda b=b: gptq(b, zeros="asymmetric") for b in (2, 3, 4, 8)},
    "gptq symmetric": gptq,
    "gptq v2": lambda: gptq(version="gptq_v2", zeros="asymmetric"),
    "gptq v2 labelled v1": lambda: gptq(stored_version="gptq_v2"),
    "gptq v1 labelled v2": lambda: gptq(version="gptq_v2", stored_version="gptq"),
    "gptq act order": lambda: gptq(act_order=True),
    "awq": awq,
    "bnb nf4 nested": bnb4,
    "bnb fp4": lambda: bnb4("fp4", nested=False),
    "bnb nf4 even": lambda: bnb4(shape=(6, 8)),
    "bnb int8": bnb_int8,
}
