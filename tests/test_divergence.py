"""The divergence against NumPy in float64, and what sets it apart from a softmax over K tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ghostlayers.divergence import top_k_divergence, top_log_probs


def drawn(positions: int = 7, vocabulary: int = 40, scale: float = 3.0):
    generator = torch.Generator().manual_seed(0)
    return [scale * torch.randn(positions, vocabulary, generator=generator) for _ in range(2)]


def softmax(logits: torch.Tensor) -> np.ndarray:
    weights = np.exp(logits.numpy().astype(np.float64))
    return weights / weights.sum(axis=-1, keepdims=True)


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (p * np.log(p / q)).sum(axis=-1)


@pytest.mark.parametrize("top_k", [1, 5, 39])
def test_equals_the_divergence_of_the_coarser_partition(top_k):
    teacher, student = drawn()
    log_probs, ids = top_log_probs(teacher, top_k)
    assert (log_probs.dtype, ids.dtype) == (torch.float16, torch.int32)
    found = top_k_divergence(student, log_probs, ids).numpy()

    p, q = softmax(teacher), softmax(student)
    order = np.argsort(-p, axis=-1)[:, :top_k]
    assert np.array_equal(np.sort(order), np.sort(ids.numpy()))
    p_top, q_top = (np.take_along_axis(x, order, axis=-1) for x in (p, q))
    parts = [np.concatenate([x, 1 - x.sum(-1, keepdims=True)], axis=-1) for x in (p_top, q_top)]
    expected = kl(*parts)
    # float16 log-probabilities of about -5: relative rounding of p of 2**-10 * 2
    np.testing.assert_allclose(found, expected, atol=5e-3)
    assert (found <= kl(p, q) + 5e-3).all()


def test_is_the_whole_divergence_when_every_token_is_kept():
    teacher, student = drawn()
    found = top_k_divergence(student, *top_log_probs(teacher, 40)).numpy()
    np.testing.assert_allclose(found, kl(softmax(teacher), softmax(student)), atol=1e-2)


def test_is_zero_for_the_teacher_itself_and_grows_with_mass_outside_the_kept_tokens():
    teacher, _ = drawn()
    kept = top_log_probs(teacher, 5)
    assert top_k_divergence(teacher, *kept).abs().max() < 1e-5
    strayed = teacher.scatter_add(1, kept[1].long(), torch.full((7, 5), -4.0))
    # Within the kept tokens nothing changed: a softmax over them alone would still say 0.
    torch.testing.assert_close(
        strayed.gather(1, kept[1].long()).softmax(-1), teacher.gather(1, kept[1].long()).softmax(-1)
    )
    p_top, q_top = (
        np.take_along_axis(softmax(x), kept[1].numpy().astype(int), axis=-1).sum(-1)
        for x in (teacher, strayed)
    )
    two = [np.stack([x, 1 - x], axis=-1) for x in (p_top, q_top)]
    np.testing.assert_allclose(top_k_divergence(strayed, *kept).numpy(), kl(*two), atol=5e-3)
    assert kl(*two).min() > 0.1


def test_gradient_is_that_of_the_formula():
    teacher, student = drawn(3, 10, 1.0)
    log_probs, ids = top_log_probs(teacher, 4)
    student.requires_grad_(True)
    top_k_divergence(student, log_probs, ids).sum().backward()
    p, q = log_probs.double().exp(), student.detach().double().softmax(-1)
    inside = torch.zeros(3, 10, dtype=torch.float64).scatter(1, ids.long(), p)
    # d D / d z = q - p on kept tokens, q - p_rest q / q_rest on the others
    outside = inside == 0
    q_rest = (q * outside).sum(-1, keepdim=True)
    wanted = torch.where(outside, q - (1 - p.sum(-1, keepdim=True)) * q / q_rest, q - inside)
    torch.testing.assert_close(student.grad.double(), wanted, atol=2e-3, rtol=0)


@pytest.mark.parametrize("ruled_out", [-torch.inf, torch.finfo(torch.float32).min])
def test_ruled_out_tokens_and_certain_teachers_give_finite_values_and_gradients(ruled_out):
    teacher, student = drawn(2, 10)
    teacher[0, 3:], student[0, 3:] = ruled_out, ruled_out
    teacher[1] = torch.tensor([1e4] + [0.0] * 9)
    student.requires_grad_(True)
    found = top_k_divergence(student, *top_log_probs(teacher, 5))
    found.sum().backward()
    assert found.isfinite().all() and student.grad.isfinite().all()
    torch.testing.assert_close(found[1].detach(), -student[1].detach().log_softmax(-1)[0])
