"""Kullback-Leibler divergence from a teacher of which only the K likeliest tokens are kept.

Legend: N positions, V vocabulary, K kept tokens. The vocabulary is divided into the teacher's K
likeliest tokens and one bucket for all others:

    D = sum_k p_k log(p_k / q_k) + p_rest log(p_rest / q_rest),  p_rest = 1 - sum_k p_k.

p and q are the full softmax probabilities of teacher and student. D is the divergence of a
coarser partition, so it never exceeds that over the whole vocabulary, is that for K = V, and is 0
only where the student gives each of the K tokens the teacher's probability. The alternative, both
softmaxes taken over the K tokens alone, is what D has beside the two-outcome divergence of the
kept mass: D = d(p_top, q_top) + p_top KL(p | top, q | top). It is blind to the mass that a student
puts on all other tokens, which is what a damaged model does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Stands in for log 0 where a model rules a token out: exp of it is 0 in float32, and 0 * log 0 = 0.
LOG_ZERO = -1e4
LOWEST = torch.finfo(torch.float32).min


def top_log_probs(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Keep what the divergence needs of a teacher.

    Args:
        logits: (..., V), any floating dtype.
        top_k: K, at most V.

    Returns:
        Natural logarithms of the K highest probabilities of the full softmax, (..., K) float16,
        and their token ids, (..., K) int32.
    """
    logits = logits.float()
    top = logits.topk(top_k, dim=-1)
    values = top.values - logits.logsumexp(dim=-1, keepdim=True)
    return values.clamp(min=LOG_ZERO).half(), top.indices.int()


def top_k_divergence(logits: Tensor, log_probs: Tensor, ids: Tensor) -> Tensor:
    """Measure D per position, in nats.

    Args:
        logits: (..., V), the student's.
        log_probs: (..., K), the teacher's, from `top_log_probs`. Their rounding is evened out: the
            K + 1 probabilities are scaled to a sum of 1.
        ids: (..., K), their tokens.

    Returns:
        (...) float32, differentiable in `logits`.
    """
    logits, ids = logits.float(), ids.long()
    p = log_probs.float().exp()
    log_q = logits.gather(-1, ids)
    if ids.shape[-1] < logits.shape[-1]:
        rest = (1.0 - p.sum(dim=-1, keepdim=True)).clamp(min=0.0)
        others = logits.scatter(-1, ids, LOWEST).logsumexp(dim=-1, keepdim=True)
        p, log_q = torch.cat([p, rest], dim=-1), torch.cat([log_q, others], dim=-1)
    log_q = (log_q - log_q.logsumexp(dim=-1, keepdim=True)).clamp(min=LOG_ZERO)
    return F.kl_div(log_q, p / p.sum(dim=-1, keepdim=True), reduction="none").sum(dim=-1)
