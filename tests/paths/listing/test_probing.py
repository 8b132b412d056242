"""What a probe finds in linear and affine operations, against matrices written down; and what it must refuse."""

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from pathspace.ops.probing import reads, reads_of_each
from pathspace.ops.terms import Operation, check_terms, terms_of


def dense(found, outputs, elements):
    matrix = torch.zeros(outputs, elements, dtype=torch.float64)
    return matrix.index_put((found.target, found.source), found.factor, accumulate=True)


@pytest.mark.parametrize("per_row", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_a_linear_map_is_found(per_row, seed):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.zeros(7, 9, dtype=torch.float64)
    for row in matrix[:-1]:  # the last row reads nothing
        row[torch.randperm(9, generator=generator)[:per_row]] = torch.randn(
            per_row, dtype=torch.float64, generator=generator
        )
    assert_close(dense(reads(lambda h: matrix @ h, 9), 7, 9), matrix)


def test_differences_whose_sum_is_zero_are_found():
    matrix = torch.tensor(
        [[1.0, -1.0, 0.0], [1.0, -2.0, 1.0], [0.0, 3.0, 0.0]], dtype=torch.float64
    )
    assert_close(dense(reads(lambda h: matrix @ h, 3), 3, 3), matrix)


@pytest.mark.parametrize("row", [[1, -3, 3, 0, 0], [-3 / 35, 12 / 35, 17 / 35, 12 / 35, -3 / 35]])
def test_what_extrapolates_or_smooths_polynomials_is_no_single_element(row):
    matrix = torch.tensor([row], dtype=torch.float64)
    assert_close(dense(reads(lambda h: matrix @ h, 5), 1, 5), matrix)


def test_a_bilinear_map_is_found_in_chunks(monkeypatch):
    monkeypatch.setattr("pathspace.ops.probing.LARGEST", 20)  # two weights at a time
    tensor = torch.zeros(3, 4, 5, dtype=torch.float64)  # [o, i, e]
    tensor[0, 1, 2], tensor[1, 3, 2], tensor[2, 0, 4], tensor[2, 2, 4] = 1.0, -2.0, 0.5, 3.0
    found = reads_of_each(lambda h, w: torch.einsum("oie,i,e->o", tensor, h, w), 4, 5, 3)
    again = torch.zeros_like(tensor).index_put(
        (found.target, found.source, found.member), found.factor
    )
    assert_close(again, tensor)


def test_too_many_pairs_are_refused():
    with pytest.raises(ps.UntraceableError, match="pairs of elements"):
        reads_of_each(lambda h, w: h.sum() * w, 2, 100_000, 100_000)


def test_what_is_not_affine_does_not_pass():
    x = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    for function in (torch.square, torch.sin, torch.relu):
        operation = Operation(function, (x,), {}, [0])
        terms = terms_of(operation, [x], 1)
        with pytest.raises(ps.UntraceableError, match="not the sum of paths"):
            check_terms("an operation", terms, [x], 1, function(x))
