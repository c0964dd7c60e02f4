"""What a monitor records: formulas against plain ones, how often, and that the model is left as it was."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tangency as tg
from tangency import dynamics as D
from tangency.dynamics.lazy_or_rich import lazy_or_rich
from tangency.dynamics.pace import Pace
from tangency.dynamics.quantities import encoded

DOUBLE = torch.float64


def net_and_probe(outputs: int = 1, n: int = 16) -> tuple[nn.Sequential, Tensor]:
    return tg.models.mlp([3, 20, outputs], nn.Tanh).double(), torch.randn(n, 3, dtype=DOUBLE)


def shift(net: nn.Module, by: float = 0.3) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p += by * torch.randn_like(p)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# ---- quantities -----------------------------------------------------------------------------------------------------


def test_quantities_are_what_their_formulas_say() -> None:
    """Against the same in the words of textbooks: n × n matrices, all eigenvectors, loops."""
    net, x = net_and_probe()
    y = torch.randn(16, dtype=DOUBLE)
    every = list(D.QUANTITIES)
    options = {"record": every, "functions": {"trace": torch.trace, "diag": torch.diag}, "top": 4}
    monitor = D.Monitor(tg.trace_ntk(net), x, y=y, loss=F.mse_loss, **options)
    monitor(0)
    k0, start = tg.trace_ntk(net)(x), torch.cat([p.detach().flatten() for p in net.parameters()])
    shift(net)
    monitor(5)
    found = monitor.history()
    assert list(found.values) == [*every, "trace", "diag"]
    k, theta = tg.trace_ntk(net)(x), torch.cat([p.detach().flatten() for p in net.parameters()])
    cosine = float((k * k0).sum() / (k.norm() * k0.norm()))
    H = torch.eye(16, dtype=DOUBLE) - 1 / 16
    yy, kc = torch.outer(y, y), H @ k @ H
    yc = torch.outer(H @ y, H @ y)
    values, vectors = torch.linalg.eigh(k)
    top, top0 = vectors[:, -4:], torch.linalg.eigh(k0).eigenvectors[:, -4:]
    angles = torch.linalg.svdvals(top0.T @ top).clamp(max=1).acos()
    p = values / values.sum()
    want = {
        "loss": float(F.mse_loss(net(x), y[:, None]).detach()),
        "change": float((k - k0).norm() / k0.norm()),
        "cosine": cosine,
        "velocity": (1 - cosine) / 5,
        "moved": float((theta - start).norm()),
        "moved_part": float((theta - start).norm() / start.norm()),
        "rotation": math.degrees(math.acos(float(angles.cos().square().mean().sqrt()))),
        "angle": math.degrees(float(angles.max())),
        "rank": math.exp(-sum(float(q) * math.log(float(q)) for q in p if q > 0)),
        "top_part": float(values[-1] / k.trace()),
        "alignment": float((k * yy).sum() / (k.norm() * yy.norm())),
        "centred_alignment": float((kc * yc).sum() / (kc.norm() * yc.norm())),
        "energy": float((top.T @ y).norm() / y.norm()),
        "trace": float(k.trace()),
    }
    for name, number in want.items():
        assert float(found[name][1]) == pytest.approx(number, rel=1e-9), name
    torch.testing.assert_close(found["eigenvalues"][1], values.flip(0)[:4])
    torch.testing.assert_close(found["spectrum"][1], values.flip(0))
    torch.testing.assert_close(found["diag"][1], k.diag())
    # The first record is compared with itself.
    first = {"change": 0, "cosine": 1, "velocity": 0, "moved": 0, "rotation": 0, "angle": 0}
    assert {name: float(found[name][0]) for name in first} == pytest.approx(first, abs=1e-6)


def test_only_what_is_chosen_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name that needs them there are no eigenpairs; θ_0 is kept only for how far it moved."""
    monkeypatch.setattr(torch.linalg, "eigh", lambda *_: pytest.fail("eigenpairs were computed"))
    net, x = net_and_probe()
    monitor = D.Monitor(tg.trace_ntk(net), x, record=("cosine", "change"))
    monitor(0)
    assert list(monitor.history().values) == ["change", "cosine"]
    assert monitor._start.theta is None
    with pytest.raises(tg.InputError, match=r"regime\(\) needs .* not recorded: velocity, moved"):
        monitor.regime()
    with pytest.raises(tg.InputError, match="'rank' was not recorded; there are change, cosine"):
        monitor.history()["rank"]


def test_full_kernels_classes_and_both_kinds_of_targets() -> None:
    net, x = net_and_probe(outputs=3)
    y = torch.arange(16) % 3
    full = D.Monitor(tg.full_ntk(net), x, y=y, record=["alignment", "energy", "spectrum"])
    full(0)
    k = tg.full_ntk(net)(x).reshape(48, 48)
    z = (F.one_hot(y, 3).double() - 1 / 3).reshape(48)
    want = z @ k @ z / (k.norm() * z.square().sum())
    assert float(full.history()["alignment"][0]) == pytest.approx(float(want))
    assert full.history()["spectrum"].shape == (1, 48)
    with pytest.raises(tg.InputError, match="'centred_alignment', which needs one row for each sample"):
        D.Monitor(tg.full_ntk(net), x, y=y, record=["centred_alignment"])
    assert "centred_alignment" not in D.Monitor(tg.full_ntk(net), x, y=y).record
    # Two classes are ±1 up to a factor, which an alignment does not see.
    k, signs = tg.trace_ntk(net)(x), (y > 0) * 2.0 - 1
    aligned = [D.Monitor(tg.trace_ntk(net), x, y=t, record=["alignment"]) for t in ((y > 0).long(), signs)]
    for monitor in aligned:
        monitor(0)
    a, b = (float(m.history()["alignment"][0]) for m in aligned)
    assert a == pytest.approx(b)
    for given, words in (
        (y[:4], r"16 samples and y is \(4,\)"),
        (y - 1, "the class -1; needed: classes from 0"),
        (torch.full((16,), math.nan), r"y\[0, 0\] is nan"),
        (3.0, "one number"),
    ):
        with pytest.raises(tg.InputError, match=words):
            D.Monitor(tg.trace_ntk(net), x, y=given)
    with pytest.raises(tg.InputError, match="y has 2 columns and the full kernel 3 outputs"):
        encoded(torch.zeros(16, 2), 16, 3)


def test_functions_of_the_user_may_change_their_gram_and_must_return_numbers() -> None:
    net, x = net_and_probe()
    monitor = D.Monitor(tg.trace_ntk(net), x, record="change", functions={"spoil": lambda K: K.zero_().sum()})
    monitor(0), monitor(1)
    assert monitor.history()["change"].tolist() == [0, 0]
    for f, words in ((lambda K: K, "returned shape"), (lambda K: "many", "returned a str")):
        with pytest.raises(tg.InputError, match=rf"functions\['f'\] {words}"):
            D.Monitor(tg.trace_ntk(net), x, functions={"f": f})(0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"record": ["chnage"]}, "record='chnage'; needed: 'loss', 'change'.*Did you mean 'change'"),
        ({"record": ["energy"]}, "'energy', which needs targets: y="),
        ({"record": ["loss"]}, "'loss', which needs targets and a loss"),
        ({"share": 0}, "share=0; needed: a part of the training time between 0 and 1"),
        ({"share": 1.5}, "share=1.5; needed"),
        ({"every": 0}, "every=0; needed: a number of steps"),
        ({"every": 3, "share": 0.1}, "share=0.1 and every=3 are given"),
        ({"top": 17}, "top=17; needed: at most 16"),
        ({"top": 0}, "top=0"),
        ({"resume": True}, "resume=True without log="),
        ({"writers": [print]}, "writers has a builtin_function_or_method; needed: add_scalar"),
    ],
)
def test_options_that_cannot_be(options: dict, words: str) -> None:
    net, x = net_and_probe()
    with pytest.raises(tg.InputError, match=words):
        D.Monitor(tg.trace_ntk(net), x, **options)


def test_probes_models_and_steps_that_cannot_be() -> None:
    net, x = net_and_probe()
    with pytest.raises(tg.InputError, match="zero samples"):
        D.Monitor(tg.trace_ntk(net), x[:0])
    with pytest.raises(tg.InputError, match="kernel is a Infinite.*; needed: one of a network"):
        D.Monitor(tg.infinite_ntk(net), x)
    monitor = D.Monitor(tg.trace_ntk(net), x)
    with pytest.raises(tg.InputError, match="nothing was watched yet"):
        monitor.history()
    for model, words in (
        (nn.Linear(3, 1), "step 0 was given a Linear, but a Sequential is watched"),
        (tg.models.mlp([3, 8, 1]), r"no checkpoint of the Sequential that is watched: params\['0.weight'\] has shape"),
        ({"weight": x}, "no checkpoint .* entries that the model lacks"),
        ("run.pt", "needed: a state dict"),
    ):
        with pytest.raises(tg.InputError, match=words):
            D.Monitor(tg.trace_ntk(net), x).step(model, 0)
    with pytest.raises(tg.InputError, match=r"needed: monitor.step\(step\) or monitor.step\(model, step\)"):
        monitor.step(net)
    monitor.step(net, 3)
    with pytest.raises(tg.InputError, match="step 3 comes after step 3; needed: growing"):
        monitor.step(3)
    monitor.close()
    monitor.close()
    with pytest.raises(tg.InputError, match="was closed and is given step 4"):
        monitor.step(4)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.MSELoss(reduction="none"), r"is a tensor \(16, 1\); needed: one number, such as their mean"),
        (lambda out, y: [0.1], "is a list; needed: one number"),
    ],
)
def test_losses_that_are_no_number(loss: Callable, words: str) -> None:
    net, x = net_and_probe()
    monitor = D.Monitor(tg.trace_ntk(net), x, y=torch.randn(16, dtype=DOUBLE), loss=loss)
    with pytest.raises(tg.InputError, match=rf"loss\(outputs, y\) of the 16 samples of the probe {words}"):
        monitor.step(0)
    plain = D.Monitor(tg.trace_ntk(net), x, y=torch.randn(16, dtype=DOUBLE), loss=lambda out, y: 0.5)
    plain(0)
    assert plain.history()["loss"].tolist() == [0.5]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_weight_norm_by_hooks_is_watched_as_its_parametrisation_is() -> None:
    """The weight that the hook makes anew before each pass is neither old nor another tensor afterwards."""
    found = []
    for norm in (nn.utils.weight_norm, nn.utils.parametrizations.weight_norm):
        torch.manual_seed(0)
        first, x = norm(nn.Linear(3, 20)), torch.randn(16, 3)
        net = nn.Sequential(first, nn.Tanh(), nn.Linear(20, 1)).double()
        x, sgd = x.double(), torch.optim.SGD(net.parameters(), 0.1)
        monitor = D.Monitor(tg.trace_ntk(net), x, y=x[:, 0], loss=F.mse_loss)
        for step in range(6):
            sgd.zero_grad()
            out = net(x)
            monitor(step)
            # A penalty on the weight, between the record and the backward pass.
            (F.mse_loss(out[:, 0], x[:, 0]) + 0.1 * first.weight.square().sum()).backward()
            sgd.step()
        history = monitor.history()
        found.append(torch.stack([history[name] for name in ("change", "rotation", "loss")]))
    torch.testing.assert_close(*found)
    assert found[0][0, -1] > 0


def test_checkpoints_wrappers_and_the_live_model_give_the_same() -> None:
    net, x = net_and_probe()
    states, live = [], D.Monitor(tg.trace_ntk(net), x, every=1)
    for step in range(3):
        states.append({k: v.clone() for k, v in net.state_dict().items()})
        live.step(nn.DataParallel(net), step)
        shift(net)
    later = D.Monitor(tg.trace_ntk(net), x, every=1)
    other = tg.models.mlp([3, 20, 1], nn.Tanh).double()
    for step, state in enumerate(states):
        other.load_state_dict(state)
        later.step(other if step == 1 else state, step)
    for name in ("change", "velocity", "moved", "rotation"):
        torch.testing.assert_close(later.history()[name], live.history()[name])


# ---- nothing changes ------------------------------------------------------------------------------------------------


class Draws(nn.Module):
    """Batch norm, dropout, a layer that is kept in evaluation mode, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.frozen = nn.BatchNorm1d(2)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.body(x))


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad], ids=["grad", "no_grad"])
def test_the_model_is_left_as_it_was(around: Callable) -> None:
    """Modes, buffers, gradients, requires_grad, random numbers, and the training that goes on."""
    net, x, y = Draws().train(), torch.randn(12, 3), torch.arange(12) % 2
    net.frozen.eval()
    F.cross_entropy(net(x), y).backward()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    grads = {k: None if p.grad is None else (p.grad, p.grad.clone()) for k, p in net.named_parameters()}
    needs = {k: p.requires_grad for k, p in net.named_parameters()}
    modes = {k: m.training for k, m in net.named_modules()}
    own = {k: id(p) for k, p in [*net.named_parameters(), *net.named_buffers()]}
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    functions = {"random": lambda K: torch.rand(()) + random.random() + np.random.rand()}
    record = list(D.QUANTITIES)
    monitor = D.Monitor(tg.trace_ntk(net), x, y=y, loss=F.cross_entropy, record=record, functions=functions, every=1)
    with around():
        monitor(0)
        assert monitor.step(net, 1)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert {k: m.training for k, m in net.named_modules()} == modes
    assert {k: p.requires_grad for k, p in net.named_parameters()} == needs
    assert {k: id(p) for k, p in [*net.named_parameters(), *net.named_buffers()]} == own
    for k, p in net.named_parameters():
        was = grads[k]
        assert p.grad is None if was is None else p.grad is was[0] and torch.equal(p.grad, was[1])
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert random.getstate() == numbers[1]
    assert np.array_equal(np.random.get_state()[1], numbers[2])
    net.eval()  # what was recorded is the model in evaluation mode
    assert float(monitor.history()["loss"][0]) == pytest.approx(float(F.cross_entropy(net(x), y).detach()), rel=1e-5)


def test_steps_are_whole_numbers_from_zero_and_a_network_that_was_widened_is_said() -> None:
    net, x = net_and_probe()
    monitor = D.Monitor(tg.trace_ntk(net), x, every=1)
    for step in (-1, 1.5, "a", None, torch.tensor(3)):
        with pytest.raises(tg.InputError, match="steps being whole numbers from 0"):
            monitor.step(step)  # type: ignore[arg-type]
    assert monitor.step(np.int64(3))
    net[0] = nn.Linear(net[0].in_features, 7).to(x.dtype)
    net[2] = nn.Linear(7, net[2].out_features).to(x.dtype)
    monitor.step(4)
    found = monitor.history()
    assert math.isnan(found["moved"][-1])
    assert float(found["change"][-1]) > 0
    assert any("needed: the same network" in note for note in found.notes)


def test_modes_come_back_after_an_error() -> None:
    net, x = Draws().train(), torch.randn(12, 3)
    modes = {k: m.training for k, m in net.named_modules()}
    monitor = D.Monitor(tg.trace_ntk(net), x, functions={"f": lambda K: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        monitor(0)
    assert {k: m.training for k, m in net.named_modules()} == modes


def test_a_training_that_diverges_is_not_stopped() -> None:
    net, x = net_and_probe()
    monitor = D.Monitor(tg.trace_ntk(net), x)
    monitor(0)
    with torch.no_grad():
        net[0].weight[0, 0] = math.nan
    monitor(1)
    found = monitor.history()
    assert math.isnan(float(found["change"][1]))
    assert found.notes[0].startswith("step 1: ")
    assert found.verdict() is None
    assert "no verdict" in found.words()


def test_a_kernel_that_dies_leaves_gaps() -> None:
    """Its last bias alone is left: a constant, which has no centred alignment. At the start that is an error."""
    net, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).double(), torch.randn(16, 3, dtype=DOUBLE)
    options = {"y": x[:, 0], "record": ["change", "centred_alignment"]}
    monitor = D.Monitor(tg.trace_ntk(net), x, **options)
    monitor(0)
    nn.init.constant_(net[0].bias, -100.0)
    monitor(1)
    found = monitor.history()
    assert float(found["change"][1]) > 0.5
    assert math.isnan(float(found["centred_alignment"][1]))
    assert found.notes[0].startswith("step 1, centred_alignment: K is constant")
    with pytest.raises(tg.InputError, match="K is constant"):
        D.Monitor(tg.trace_ntk(net), x, **options)(0)


# ---- how often ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "cost", "step"), [(0.05, 2.0, 0.25), (0.2, 0.5, 0.1), (0.01, 0.02, 0.03)])
def test_the_share_holds_over_the_whole_run(share: float, cost: float, step: float) -> None:
    clock = Clock()
    pace = Pace(share, None, clock=clock)
    training, looks = 0.0, []
    for k in range(4000):
        if pace.due(k):
            with pace.looking():
                clock.now += cost * (5 if k == 0 else 1)  # the first is slower, as it is
            looks.append(k)
        clock.now += step
        training += step
    with pace.looking():  # the last, which is always made
        clock.now += cost
    assert looks[0] == 0
    assert pace.spent == pytest.approx(cost * (len(looks) + 5))
    assert pace.part() == pytest.approx(pace.spent / training)
    assert share * training - 2 * cost <= pace.spent <= share * training + 1e-9
    assert pace.skipped + len(looks) == 4000


def test_skips_hold_the_share_and_are_counted_and_the_ends_are_recorded() -> None:
    clock, (net, x) = Clock(), net_and_probe()

    def slow(K: Tensor) -> float:
        clock.now += 1.0
        return 0.0

    with D.Monitor(tg.trace_ntk(net), x, share=0.1, functions={"slow": slow}, clock=clock) as monitor:
        recorded = []
        for step in range(98):
            recorded += [step] if monitor.step(step) else []
            clock.now += 1.0
    assert recorded == [0, *range(30, 98, 10)]
    assert monitor.history().steps.tolist() == [*recorded, 97]
    assert monitor.skipped == monitor.history().skipped == 98 - 9
    assert monitor.share <= 0.1
    assert monitor.history().seconds.tolist() == [1.0] * 9
    assert "9 records up to step 97 took 9 s; 89 calls were skipped." in monitor.history().words()


def test_every_and_calls_by_hand_and_a_run_that_fails() -> None:
    net, x = net_and_probe()
    monitor = D.Monitor(tg.trace_ntk(net), x, record="change", every=4)
    with pytest.raises(KeyError), monitor:
        for step in range(1, 11):
            monitor.step(None, step)
            if step == 6:
                shift(net)
                monitor(6)  # somebody wants this one
        raise KeyError
    assert monitor.history().steps.tolist() == [1, 4, 6, 8]
    assert not monitor.history().ended
    assert monitor.history().skipped == 7  # 6 was, before it was recorded by hand
    monitor.close()
    assert monitor.history().steps.tolist() == [1, 4, 6, 8, 10]
    assert monitor.history().ended


# ---- lazy or rich ---------------------------------------------------------------------------------------------------


def trained(width: int, parametrization: str) -> D.Evolution:
    x = F.normalize(torch.randn(40, 6, generator=torch.Generator().manual_seed(0))) * 6**0.5
    y = torch.tanh(2 * x[:, :1] * x[:, 1:2])
    make = lambda: tg.models.mlp([6, width, 1], parametrization=parametrization)  # noqa: E731
    net = tg.models.initialized(make, seed=0)
    lr = D.max_learning_rate(tg.trace_ntk(net)(x), curvature=2 / len(x)) / 2
    sgd, adam = lambda p: torch.optim.SGD(p, lr=lr), lambda p: torch.optim.Adam(p, lr=3e-2)
    monitor = D.Monitor(tg.trace_ntk(net), x, y=y, loss=F.mse_loss)
    optimizer = sgd if parametrization == "ntk" else adam
    D.train(net, x, y, loss=F.mse_loss, optimizer=optimizer, steps=120, every=120, watch=monitor, progress=False)
    return monitor.history()


def test_wide_networks_are_lazy_and_narrow_ones_rich() -> None:
    wide, narrow = trained(1024, "ntk").verdict(), trained(32, "standard").verdict()
    assert wide.kind == "lazy"
    assert wide.numbers["change"] <= wide.lazy["change"]
    assert narrow.kind == "rich"
    assert narrow.numbers["rotation"] >= narrow.rich["rotation"]
    assert str(narrow).startswith("rich: the kernel changed")


@pytest.mark.parametrize(
    ("now", "kind", "words"),
    [
        ({"change": 0.1}, "lazy", "at most 10 %"),
        ({"change": 0.3, "rotation": 40.0}, "in between", "lazy is at most 10 %, rich at least 50 %"),
        ({"change": 4.0, "rotation": 3.0}, "in between", "it grew or shrank, but turned by less than 10°"),
        ({"change": 4.0, "cosine": 0.5}, "rich", "cosine with the first is 0.5; rotation was not recorded"),
        ({"change": 0.01, "loss": 0.9}, "lazy", "little was learned yet: the loss went from 1 to 0.9"),
    ],
)
def test_verdicts_say_why(now: dict[str, float], kind: str, words: str) -> None:
    found = lazy_or_rich(now, {"loss": 1.0})
    assert found is not None
    assert found.kind == kind
    assert words in found.why
    assert set(found.numbers) == set(now)


def test_histories_have_tables_and_pictures() -> None:
    net, x = net_and_probe()
    monitor = D.Monitor(tg.trace_ntk(net), x, record=["change", "eigenvalues"], functions={"trace": torch.trace})
    for step in (0, 2, 4):
        monitor(step)
        shift(net)
    found = monitor.history()
    assert len(found) == 3
    assert [line.split()[0] for line in found.table(2).splitlines()] == ["step", "2", "4"]
    kept = found.to_dict()
    assert kept["values"]["change"][0] == 0

    pytest.importorskip("matplotlib")
    axes = found.plot().axes
    assert [a.get_title() for a in axes] == ["‖Θ_t − Θ_0‖ / ‖Θ_0‖", "largest eigenvalues", "trace"]
    assert len(axes[1].lines) == monitor.history()["eigenvalues"].shape[1]
    two = tg.plots.draw_evolution(found, found, names=["a", "b"]).axes
    assert len(two[0].lines) == 2
