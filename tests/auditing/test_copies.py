"""Copies: equal ones always, near ones and mirror images, few by chance; contradictory labels; memory in bands."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency.auditing import machine
from tangency.auditing.audit import copies_of
from tangency.auditing.copies import DISCOVERIES, Around, Copies, around, chances, digests, find_copies
from tangency.auditing.data import Data
from tangency.auditing.machine import FeatureMachine, Nearest
from tangency.auditing.views import Views, without_itself
from tangency.datasets import Labelled
from tangency.decisions.layered import _layers, views

K = 20


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def found_in(x: Tensor, z: Tensor, y: Tensor | None = None, yz: Tensor | None = None) -> tuple[Copies, Copies]:
    """Copies within x, and leaks of z, by the features themselves."""
    y, yz = torch.zeros(len(x)).long() if y is None else y, torch.zeros(len(z)).long() if yz is None else yz
    data = Data(Labelled(x, y, ("a", "b")), Labelled(z, yz, ("a", "b")))
    seen = Views(x, z, None, None, "themselves")
    within, leaks = copies_of(data, seen.within(K, False), seen.between(K, False), (x, z), seen.by)
    assert leaks is not None
    return within, leaks


@pytest.mark.parametrize("d", [5, 20])
def test_independent_points_are_no_copies(d: int) -> None:
    """p-values of the nearest are at most as often small as they should be, and next to nothing is found."""
    x, z = torch.randn(4000, d, generator=generator()), torch.randn(2000, d, generator=generator(1))
    near, asked = FeatureMachine(x).nearest(K, False), FeatureMachine(x, z).nearest_to_test(K, False)
    known = around(near)
    p = chances(asked, known.inverse[asked.places].mean(1), known)[:, 0]
    for level in (0.3, 0.1, 0.03, 0.01):
        expected = level * len(p)
        assert float((p <= level).sum()) <= expected + 4 * expected**0.5
    within, leaks = found_in(x, z)
    assert len(within) + len(leaks) <= 2


@pytest.mark.parametrize("d", [5, 20])
def test_near_copies_are_found_and_little_else(d: int) -> None:
    x, z = torch.randn(4000, d, generator=generator()), torch.randn(1000, d, generator=generator(1))
    z[:200] = x[:200] + 0.01 * torch.randn(200, d, generator=generator(2))
    _, leaks = found_in(x, z)
    pairs = set(map(tuple, leaks.pairs.tolist()))
    true = {(i, i) for i in range(200)}
    assert len(pairs & true) >= 0.95 * len(true)
    assert len(pairs - true) <= DISCOVERIES * len(pairs) + 4
    assert bool((leaks.chance.diff() >= 0).all())  # the surest first


def test_equal_samples_are_always_found() -> None:
    """Also where more are equal than there are neighbours, and where one is no neighbour of the other."""
    x, z = torch.randn(300, 4, generator=generator()), torch.randn(50, 4, generator=generator(1))
    x[100:130] = x[7]
    z[3] = x[7]
    z[4] = x[200]
    within, leaks = found_in(x, z)
    exact = {tuple(pair) for pair in within.pairs[within.exact].tolist()}
    assert exact >= {(7, i) for i in range(100, 130)}
    assert [7, *range(100, 130)] in within.groups()
    assert {(3, 7), (4, 200)} <= {tuple(pair) for pair in leaks.pairs[leaks.exact].tolist()}
    assert bool((leaks.similarity[leaks.exact] == 1).all())


def test_contradictory_labels() -> None:
    x = torch.randn(300, 4, generator=generator())
    x[10], x[20] = x[11], x[21] + 1e-3
    y = torch.zeros(300).long()
    y[10] = y[20] = 1
    within, _ = found_in(x, torch.randn(5, 4, generator=generator(1)), y)
    differ = {tuple(pair) for pair in within.pairs[within.contradictory].tolist()}
    assert differ == {(10, 11), (20, 21)}


def test_both_samples_have_to_be_surprised() -> None:
    """Far nearer than the other neighbours of one; but the other has as many as that nearer by: no copy."""
    distance = torch.tensor([[0.01, 0.5, 1.0]]).double()
    near = Nearest(1 - distance.square() / 2, torch.tensor([[0, 1, 2]]))
    inverse = torch.full((3,), 0.2).double()
    far, close = (Around(torch.tensor([r, 1.0, 1.0]).double(), inverse) for r in (1.0, 0.01))
    assert float(chances(near, inverse[:1], far)[0, 0]) < 1e-9
    assert float(chances(near, inverse[:1], close)[0, 0]) == 1


def test_chances_are_those_of_the_smallest_of_uniform_numbers() -> None:
    """Both samples see the same: 1 − (1 − r^d)^(k − 1); 1 for the last neighbour, and not less for farther ones."""
    distance = torch.tensor([[0.1, 0.2, 0.4]]).double()
    near = Nearest(1 - distance.square() / 2, torch.tensor([[0, 1, 2]]))
    inverse = torch.full((3,), 0.5).double()
    p = chances(near, inverse[:1], Around(torch.full((3,), 0.4).double(), inverse))
    torch.testing.assert_close(p, 1 - (1 - (distance / 0.4) ** 2) ** 2)


def test_both_orders_of_a_pair_are_one() -> None:
    x = torch.randn(200, 3, generator=generator())
    x[50] = x[60] + 1e-4
    names = digests(x)
    near = FeatureMachine(x).nearest(K, False)
    known = around(near)
    found = find_copies([near], known.inverse, known, (names, names), None)
    assert found.pairs.tolist().count([50, 60]) == 1
    assert [60, 50] not in found.pairs.tolist()


# ---- mirror images, layers ------------------------------------------------------------------------------------------


def test_a_sample_is_no_neighbour_of_its_mirror_image() -> None:
    near = Nearest(torch.tensor([[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]]), torch.tensor([[2, 0, 1], [2, 3, 0]]))
    rest = without_itself(near)
    assert rest.places.tolist() == [[2, 1], [2, 3]]
    torch.testing.assert_close(rest.similarity, torch.tensor([[0.9, 0.7], [0.9, 0.8]]))


def pictures(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = generator(seed)
    return torch.nn.functional.avg_pool2d(torch.randn(n, 3, 12, 12, generator=g), 3, 1, 1), torch.arange(n) % 2


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 16), nn.ReLU(),
        nn.Linear(16, 2),
    ).eval()  # fmt: skip


def test_mirror_images_are_found() -> None:
    (x, y), (z, yz) = pictures(300, 0), pictures(40, 1)
    z[5], z[6], x[17] = x[10].flip(-1), x[11], x[30].flip(-1)
    found = tg.audit(network(), (x, y), (z, yz), progress=False)
    assert found.leaks is not None
    leaks = {tuple(pair): bool(m) for pair, m in zip(found.leaks.pairs.tolist(), found.leaks.mirrored, strict=True)}
    assert leaks[5, 10]
    assert not leaks[6, 11]
    assert [17, 30] in found.copies.pairs[found.copies.mirrored].tolist()
    assert "2 hidden layers" in found.leaks.by


def test_layers_are_what_goes_into_blocks_with_parameters() -> None:
    assert _layers(network()) == ["3", "5"]
    deep = nn.Sequential(*(nn.Linear(3, 3) for _ in range(30)))
    assert len(_layers(deep)) == 8
    assert _layers(deep)[-1] == "28"
    assert _layers(nn.Linear(3, 2)) == []


def test_each_layer_counts_as_much_as_another() -> None:
    (x, _), net = pictures(30, 0), network()
    seen = views(net, x, None, None, False)
    assert seen is not None
    assert seen.test is None
    torch.testing.assert_close(seen.train.unflatten(1, (2, -1)).norm(dim=2), torch.ones(30, 2))
    assert seen.mirrored_train is not None
    again = views(net, x.flip(-1), None, None, False)
    assert again is not None
    torch.testing.assert_close(again.train, seen.mirrored_train)


def test_a_network_without_hidden_layers_is_audited_by_its_kernel() -> None:
    x = torch.randn(40, 3, generator=generator())
    assert views(nn.Linear(3, 2), x, None, None, False) is None
    found = tg.audit(nn.Linear(3, 2).eval(), (x, (x[:, 0] > 0).long()), progress=False)
    assert found.copies.by == "the kernel trNTK"
    assert not found.copies.mirrored.any()


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_neighbours_are_looked_for_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix of all pairs is made: no band has more numbers than it may."""
    sizes: list[int] = []
    largest = machine._largest

    def counted(band: Tensor, *args: object) -> Nearest:
        sizes.append(band.numel())
        return largest(band, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(machine, "_largest", counted)
    monkeypatch.setattr(machine, "BAND", 1000)
    x, z = torch.randn(200, 3, generator=generator()), torch.randn(90, 3, generator=generator(1))
    seen = Views(x, z, x.flip(1), z.flip(1), "")
    banded: Sequence[Nearest] = [*seen.within(K, False), *seen.between(K, False)]
    assert max(sizes) <= 1000
    assert sum(sizes) == 2 * (200 + 90) * 200
    monkeypatch.setattr(machine, "BAND", 10**6)
    at_once = [*seen.within(K, False), *seen.between(K, False)]
    for a, b in zip(banded, at_once, strict=True):
        torch.testing.assert_close(a.similarity, b.similarity)


def test_chances_take_no_more_than_a_few_numbers_for_each_neighbour() -> None:
    """[n, k] and no [n, k, k]: counted over all operations."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    x = torch.randn(500, 3, generator=generator())
    near = FeatureMachine(x).nearest(K, False)
    with Sizes():
        known = around(near)
        chances(near, known.inverse, known)
    assert largest <= 500 * K
