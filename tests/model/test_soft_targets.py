"""The loss of a student, where its probabilities and the teacher's lie far apart."""

from __future__ import annotations

import pytest
import torch

from meshwright.model.chunked_cross_entropy import linear_cross_entropy
from meshwright.model.soft_targets import SoftTargets
from meshwright.spec.distil import DistilSpec


@pytest.mark.parametrize("gap", [20.0, 95.0, 1000.0])
def test_gradient_is_finite_where_the_student_leaves_nothing_to_other_tokens(gap: float) -> None:
    # One likeliest token; the logit of each of the other two is `gap` lower.
    weight = torch.tensor([[gap], [0.0], [0.0]])
    x = torch.ones(1, 1, requires_grad=True)
    log_p = torch.tensor([[0.5, 0.5]]).log()
    soft_targets = SoftTargets(DistilSpec(teacher="teacher", top_k=1, weight=1.0), log_p, torch.tensor([[0]]))
    linear_cross_entropy(x, weight, torch.tensor([0]), soft=soft_targets).backward()
    # d KL/d logits = q - p, and 1 - 1/2 at the likeliest token.
    torch.testing.assert_close(x.grad, torch.tensor([[gap / 2]]))
