"""What MaxText makes of FP8 codes and their scale when its loader dequantises them, written down from its rule."""

import numpy as np


def maxtext_dequantises(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What MaxText's loader makes of FP8 codes and their scale, by the rule for shapes in its order, in float32."""
    codes, scale = codes.astype(np.float32), scale.astype(np.float32)
    same_rank = codes.ndim == scale.ndim
    if scale.ndim == 0 or codes.shape == scale.shape:
        return codes * scale
    if same_rank and all(n % m == 0 for n, m in zip(codes.shape, scale.shape, strict=True)):
        for axis, (n, m) in enumerate(zip(codes.shape, scale.shape, strict=True)):
            scale = np.repeat(scale, n // m, axis=axis)
        return codes * scale
    if scale.shape == codes.shape[: scale.ndim]:
        return codes * scale.reshape(scale.shape + (1,) * (codes.ndim - scale.ndim))
    return codes * scale
