"""Sharpness against dense oracles: the whole Hessian by torch.func of a plain network, and eigenvalues by LAPACK."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from conadv import split_batchnorm
from conadv.core.batchnorm.splitbn import routed
from conadv.task.sharpness import Surface, largest_eigenvalues, random_start, trace, worst_value


def network() -> nn.Sequential:
    """A small network with BatchNorm layers whose statistics are not 0 and 1, in eval mode."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers).double()
    for _ in range(3):
        model(3 * torch.rand(9, 1, 4, 4, dtype=torch.float64) - 1)
    return model.eval()


@pytest.fixture
def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.rand(size, 1, 4, 4, dtype=torch.float64), torch.randint(3, (size,))) for size in (5, 3)]


def surface_of(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Surface:
    return Surface(lambda images, labels: F.cross_entropy(model(images), labels), list(model.parameters()), batches)


def dense(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The Hessian of the mean loss over all images at once, differentiated by torch.func."""
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    own = dict(model.named_parameters())
    sizes = [weight.numel() for weight in own.values()]

    def loss(vector: Tensor) -> Tensor:
        parts = zip(own.items(), vector.split(sizes), strict=True)
        return F.cross_entropy(
            functional_call(model, {name: part.view_as(weight) for (name, weight), part in parts}, images), labels
        )

    return jacrev(grad(loss))(torch.cat([weight.detach().flatten() for weight in own.values()]))


@pytest.mark.parametrize("branch", ["main", "adv"])
def test_products_are_those_of_the_dense_hessian_of_each_branch(branch, batches):
    plain, split = network(), split_batchnorm(network())
    if branch == "adv":  # another network than the main one: both have its weights in this branch
        for layer in (plain[1], split[1].adv):
            torch.manual_seed(2)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            layer.running_mean.uniform_(-1, 1)
            layer.num_batches_tracked.fill_(1)
    matrix = dense(plain, batches)
    with routed(split, branch, statistics="running", tracking="off"):
        surface = surface_of(split, batches)
        assert len(surface.point) == len(matrix), "the weights of the other branch are left out"
        products = torch.stack([surface.times_hessian(unit) for unit in torch.eye(len(matrix), dtype=torch.float64)])
        gradient = surface.gradient()
    order = _order(plain, split, branch)
    assert torch.allclose(products, matrix[order][:, order], rtol=0, atol=1e-12)
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    F.cross_entropy(plain(images), labels).backward()
    assert torch.allclose(gradient, torch.cat([own.grad.flatten() for own in plain.parameters()])[order])


def _order(plain: nn.Module, split: nn.Module, branch: str) -> list[int]:
    """Where each weight of the split network's branch stands among those of the plain one."""
    places, start = {}, 0
    for name, weight in plain.named_parameters():
        places[name] = range(start, start + weight.numel())
        start += weight.numel()
    names = [name for name, _ in split.named_parameters() if branch == "adv" or ".adv." not in name]
    used = [name for name in names if branch == "main" or ".adv." in name or not name.startswith("1.")]
    return [place for name in used for place in places[name.replace(".adv.", ".")]]


def test_lanczos_and_hutchinson_find_what_the_dense_hessian_has(batches):
    model = network()
    matrix, surface = dense(model, batches), surface_of(model, batches)
    start = random_start(surface.point)
    expected = torch.linalg.eigvalsh(matrix).flip(0)[:4]
    found = largest_eigenvalues(surface.times_hessian, start, 4, 60, 1e-8)
    assert found.values == pytest.approx(expected.tolist(), rel=1e-8)
    assert torch.allclose(matrix @ found.vector, found.values[0] * found.vector, atol=1e-6)
    estimate, error = trace(surface.times_hessian, start, 200)
    assert abs(estimate - float(matrix.trace())) < 4 * error
    assert error == pytest.approx(
        float((2 * (matrix.square().sum() - matrix.diag().square().sum()) / 200).sqrt()), rel=0.2
    )


def test_residuals_bound_the_error_of_an_unfinished_lanczos():
    torch.manual_seed(3)
    matrix = torch.randn(40, 40, dtype=torch.float64)
    matrix = matrix + matrix.T
    found = largest_eigenvalues(lambda vector: matrix @ vector, torch.randn(40, dtype=torch.float64), 3, 12, 0.0)
    exact = torch.linalg.eigvalsh(matrix)
    for value, residual in zip(found.values, found.residuals, strict=True):
        assert float((exact - value).abs().min()) <= residual + 1e-12
    whole = largest_eigenvalues(lambda vector: matrix @ vector, torch.randn(40, dtype=torch.float64), 40, 99, 0.0)
    assert whole.values == pytest.approx(exact.flip(0).tolist(), abs=1e-9)


class Attention(nn.Module):
    """Attention by PyTorch's fused kernel, over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        query, key, value = self.project(images).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(query, key, value).mean((1, 2)))


def test_attention_has_a_hessian(batches):
    torch.manual_seed(4)
    model = Attention().double()
    surface = surface_of(model, batches)
    direction = torch.randn(len(surface.point), dtype=torch.float64)
    ends = []
    for sign in (1, -1):
        with surface.moved(sign * 1e-5 * direction):
            ends.append(surface.gradient())
    assert torch.allclose(surface.times_hessian(direction), (ends[0] - ends[1]) / 2e-5, atol=1e-7)


class Fused(Attention):
    """The same, with a kernel that has no second derivative whatever the context says."""

    def forward(self, images: Tensor) -> Tensor:
        query, key, value = self.project(images).chunk(3, -1)
        mixed, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
        return self.head(mixed.mean((1, 2)))


def test_a_network_without_second_derivatives_is_refused_in_one_line(batches):
    surface = surface_of(Fused().double(), batches)
    with pytest.raises(ValueError, match=r"no second derivative.*_backward is not implemented.*: replace") as no:
        surface.times_hessian(surface.point)
    assert "\n" not in str(no.value)


class Quadratic(Surface):
    """xᵀAx/2 + bᵀx around x = 0, as a surface."""

    def __init__(self, matrix: Tensor, slope: Tensor) -> None:
        self._matrix, self._slope, self._x = matrix, slope, nn.Parameter(torch.zeros_like(slope))
        super().__init__(self._at, [self._x], [(torch.zeros(1), None)])

    def _at(self, images: Tensor, labels: None) -> Tensor:
        return self._x @ self._matrix @ self._x / 2 + self._slope @ self._x


@pytest.mark.parametrize("seed", range(3))
def test_the_worst_loss_of_a_ball_is_the_largest_of_a_quadratic(seed):
    """On a sphere the maximum of a quadratic is the x with (m·1 - A)x = b for the m above all eigenvalues."""
    torch.manual_seed(seed)
    root = torch.randn(6, 6, dtype=torch.float64)
    matrix, slope, radius = root @ root.T, torch.randn(6, dtype=torch.float64), 0.7
    unit = torch.eye(6, dtype=torch.float64)
    low = float(torch.linalg.eigvalsh(matrix)[-1])
    high = low + float(slope.norm()) / radius
    for _ in range(200):
        middle = (low + high) / 2
        length = torch.linalg.solve(middle * unit - matrix, slope).norm()
        low, high = (middle, high) if length > radius else (low, middle)
    x = torch.linalg.solve(high * unit - matrix, slope)
    expected = float(x @ matrix @ x / 2 + slope @ x)
    surface = Quadratic(matrix, slope)
    top = largest_eigenvalues(surface.times_hessian, torch.randn(6, dtype=torch.float64), 1, 6, 0.0).vector
    assert worst_value(surface, radius, (surface.gradient(), top), 60) == pytest.approx(expected, rel=1e-6)
    assert worst_value(surface, radius, (surface.gradient(),), 1) <= expected
    assert torch.equal(surface.point, torch.zeros(6, dtype=torch.float64)), "the weights are where they were"
