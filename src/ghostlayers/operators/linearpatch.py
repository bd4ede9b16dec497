"""LinearPatch (arXiv 2505.24680): rescale every channel, as it is or after a Hadamard rotation.

W = H diag(d) Hᵀ with d = mean|YH| / mean|XH| per channel over all counted tokens; H is the identity
(`linearpatch-diag`), or the normalised Hadamard matrix or what `rotation` puts in its place
(`linearpatch-rotate`). W = I + M is stored as a dense M in both cases, as the paper does, so that
it can be trained further. The patch restores mean magnitudes; the relative error, which a few
massive tokens rule, may rise although perplexity falls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..channel_moments import ChannelMoments
from ..moments import SplitMoments
from ..rotation import rotation_name, rotation_warnings
from . import OperatorFit
from .ghost import fit_errors


def patch_matrix(scale: Tensor, rotation: Tensor | None) -> Tensor:
    """Return M = H diag(d − 1) Hᵀ, (C, C) float64, from d (C,) and H (C, C) or None."""
    if rotation is None:
        return (scale - 1.0).diag()
    m: Tensor = (rotation * (scale - 1.0)) @ rotation.T
    return m


def fit_linearpatch(
    moments: SplitMoments[ChannelMoments],
    *,
    ridge: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> OperatorFit:
    """Fit the patch (paper, equations 4 to 6) on all counted tokens.

    Args:
        moments: Channel moments; whether they are rotated decides which of the two methods it is.
        ridge: Not used: nothing is solved.
        dtype: Dtype in which the operator will be stored; the errors are those after rounding.

    Returns:
        The fit; `tensors["m"]` is (C, C) of that dtype.
    """
    total = moments.total
    scale, rotation = total.scale(), total.rotation
    m = patch_matrix(scale, rotation)
    tensors, fit_part = {"m": m.to(dtype)}, {}
    if moments.fit.num_tokens and moments.held_out.num_tokens:
        fit_part = {"m": patch_matrix(moments.fit.scale(), rotation).to(dtype)}
    second = SplitMoments(moments.boundary, moments.fit.second, moments.held_out.second)
    diagnostics = fit_errors(second, tensors["m"], fit_part.get("m"))
    diagnostics |= {
        "scale_mean": float(scale.mean()),
        "scale_min": float(scale.min()),
        "scale_max": float(scale.max()),
        "dead_channels": total.num_dead(),
        "frobenius_norm": float(m.norm()),
    }
    warnings: tuple[str, ...] = ()
    if rotation is not None:
        diagnostics["rotation"] = rotation_name(len(rotation))
        warnings = rotation_warnings(len(rotation))
    return OperatorFit(
        name="linearpatch-diag" if rotation is None else "linearpatch-rotate",
        tensors=tensors,
        diagnostics=diagnostics,
        fit_part=fit_part,
        warnings=warnings,
    )
