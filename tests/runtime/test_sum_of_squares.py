"""The gradient norm does not lose precision with the number of elements."""

from __future__ import annotations

import torch

from autopar.runtime.parameter_unit import sum_of_squares


def test_the_sum_of_squares_of_many_elements_is_exact_to_float64():
    values = torch.randn(2**24, generator=torch.Generator().manual_seed(0))
    exact = values.double().square().sum()
    torch.testing.assert_close(sum_of_squares(values), exact, rtol=1e-12, atol=0)


def test_no_elements_sum_to_zero():
    assert sum_of_squares(torch.empty(0)).item() == 0
