"""One rule for what users give: arrays are as good as tensors, floats of any width come to the type computed in."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import tangency as tg
from tangency._base import tree

torch.manual_seed(0)
WIDE = torch.randn(9, 3, dtype=torch.float64)
X = WIDE.float()
Y = torch.arange(9) % 3
MODEL = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))


class Pair(NamedTuple):
    """Two inputs by name."""

    a: object
    b: object


class Two(nn.Module):
    """Takes a table, token numbers, a mask and a flag."""

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, a, b, mask=None, twice=False):
        h = a + self.words(b).mean(1)
        h = h if mask is None else torch.where(mask, h, torch.zeros_like(h))
        return self.last(torch.tanh(2 * h if twice else h))


def strange(v: np.ndarray) -> dict[str, np.ndarray]:
    """The same numbers in arrays that torch cannot share, or not without a warning."""
    frozen = v.copy()
    frozen.flags.writeable = False
    return {
        "plain": v,
        "not writable": frozen,
        "backwards": v[::-1].copy()[::-1],
        "other byte order": v.astype(v.dtype.newbyteorder(">")),
        "fortran": np.asfortranarray(v),
        "float16": v.astype(np.float16).astype(v.dtype),
    }


@pytest.mark.filterwarnings("error")
def test_arrays_are_taken_where_tensors_are() -> None:
    k = tg.trace_ntk(MODEL)
    for name, given in strange(X.numpy()).items():
        x = torch.tensor(np.array(given, dtype=np.float32))
        expected, before = k(x), given.copy()
        assert torch.equal(k(given), expected), name
        assert torch.equal(k(given, given[:4]), k(x, x[:4])), name
        assert torch.equal(k.diag(given), k.diag(x)), name
        assert torch.equal(k.features(given), k.features(x)), name
        assert torch.equal(k.parts(given)["0.weight"], k.parts(x)["0.weight"]), name
        assert k.costs(given).table() == k.costs(x).table()
        np.testing.assert_array_equal(given, before)


@pytest.mark.parametrize("width", [np.float16, np.float32, np.float64])
@pytest.mark.every(3)
def test_floats_of_any_width_come_to_the_type_that_is_computed_in(width: type) -> None:
    given = WIDE.numpy().astype(width)
    narrow, wide = torch.tensor(given).float(), torch.tensor(given).double()
    models = {"0": MODEL, "1": nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()}
    for name, x in (("0", narrow), ("1", wide)):
        for make in (tg.trace_ntk, tg.conjugate_kernel, tg.embedding_kernel):
            k = make(models[name])
            assert torch.equal(k(given), k(x))
            assert torch.equal(k(torch.tensor(given)), k(x))
    k = tg.trace_ntk(MODEL, dtype="float64")
    assert torch.equal(k(given), k(wide))
    assert k(given).dtype == torch.float64
    assert torch.equal(tg.infinite_ntk(MODEL)(given), tg.infinite_ntk(MODEL)(wide))
    p = tg.projected(tg.trace_ntk(MODEL), dim=8)
    assert torch.equal(p.features(given), p.features(narrow))
    assert torch.equal(tg.linearize(MODEL)(given), tg.linearize(MODEL)(narrow))
    assert torch.equal(tg.compute(tg.trace_ntk(MODEL), given).dense(), tg.trace_ntk(MODEL)(narrow))
    assert torch.equal(tg.models.outputs(MODEL, given), tg.models.outputs(MODEL, narrow))


def test_only_floating_leaves_are_cast_in_tuples_and_dicts() -> None:
    model, words = Two(), np.array([[0, 1], [2, 3], [4, 0], [1, 1]])
    a, mask = WIDE[:4].numpy(), np.array([[True], [False], [True], [True]])
    k = tg.trace_ntk(model)
    tensors = (torch.tensor(a).float(), torch.tensor(words))
    expected = k(tensors)
    assert torch.equal(k((a, words)), expected)
    assert torch.equal(k([a, words.astype(np.int32)]), expected)
    assert torch.equal(k(Pair(a, words)), expected)
    assert torch.equal(k({"a": a, "b": words, "twice": False}), expected)
    assert torch.equal(k((a, tensors[1])), expected)
    masked = k({"a": a, "b": words, "mask": mask, "twice": True})
    full = {"a": tensors[0], "b": tensors[1], "mask": torch.tensor(mask), "twice": True}
    assert torch.equal(masked, k(full))
    assert not torch.equal(masked, expected)


def test_a_state_dict_of_another_type_says_in_what_to_compute() -> None:
    wide = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    k = tg.trace_ntk(MODEL, params=wide.state_dict())
    for x in (X, WIDE.numpy()):
        assert torch.equal(k(x), tg.trace_ntk(wide)(x))


def test_parameters_of_several_types_leave_inputs_as_they_are() -> None:
    class Mixed(nn.Module):
        """A norm in 64 bits, the rest in 32."""

        def __init__(self):
            super().__init__()
            self.norm, self.last = nn.LayerNorm(3).double(), nn.Linear(3, 2)

        def forward(self, x):
            return self.last(self.norm(x.double()).float())

    k = tg.trace_ntk(Mixed())
    assert torch.allclose(k(X), k(X.double()), rtol=1e-5)
    with pytest.raises(tg.InputError, match=r"x is torch.float16, the parameters are .*Cast one"):
        k(X.half())


def test_a_number_that_is_too_large_is_refused() -> None:
    given = WIDE.clone()
    given[4, 1] = 1e39
    k, message = tg.trace_ntk(MODEL), r"\[4, 1\] is 1e\+39, too large for torch.float32.*float64"
    for attempt, name in (
        (lambda: k(given), "x"),
        (lambda: k(X, given.numpy()), "x2"),
        (lambda: tg.compute(k, given), "x1"),
        (lambda: tg.linearize(MODEL)(given), "x"),
        (lambda: k((given, Y)), r"x\[0\]"),
    ):
        with pytest.raises(tg.InputError, match=name + message):
            attempt()
    # Infinities were there before, and are not ours to find here.
    given[4, 1] = torch.inf
    assert bool(tree.cast(given, torch.float32).isinf().any())
    assert torch.isfinite(tg.trace_ntk(MODEL, dtype="float64")(WIDE * 1e39)).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.array([["a", "b"]]), r"x is an array of <U1, of which there are no tensors; needed: numbers"),
        (np.array([[1, None]], dtype=object), r"x is an array of object"),
        (np.zeros((2, 3), np.longdouble), r"x is an array of float128.*x.astype\(np.float32\)"),
        (np.zeros(2, "datetime64[s]"), r"x is an array of datetime64"),
        (np.ma.masked_array(np.zeros((2, 3)), np.eye(2, 3)), r"x is a masked array.*x.filled"),
        ((np.zeros((2, 3)), np.array(["a", "b"])), r"x\[1\] is an array of <U1"),
        ({"input": np.array([{}, {}])}, r"x\['input'\] is an array of object"),
        (np.zeros((0, 3)), r"a batch of zero samples"),
        (np.float64(3), r"x is a float64; needed: a tensor or NumPy array.*numpy.asarray\(x\)"),
        ([[1.0, 2.0, 3.0]], r"x holds no tensor or array.*numpy.asarray\(x\)"),
        (X.to_sparse(), r"x is a sparse tensor; needed: a dense one, x.to_dense\(\)"),
        ({"input": X.to_sparse()}, r"x\['input'\] is a sparse tensor"),
        (pytest.importorskip("scipy.sparse").csr_matrix(X.numpy()), r"x is a csr_matrix; .*matrix: x.toarray\(\)"),
        (
            list(X),
            r"takes \[?\(?'?input'?\]?\)?.*Of a list of samples make one tensor: torch.stack\(x\), .*numpy.stack",
        ),
        (list(X.numpy()), r"Of a list of samples make one tensor: torch.stack\(x\), of arrays numpy.stack\(x\)"),
    ],
)
def test_arrays_that_are_no_numbers_are_refused(given: object, message: str) -> None:
    for k in (tg.trace_ntk(MODEL), tg.infinite_ntk(MODEL)):
        with pytest.raises(tg.InputError, match=message):
            k(given)


def test_nested_tensors_are_refused() -> None:
    """Made here, not where tests are collected: torch imports its compiler for one."""
    nested = torch.nested.nested_tensor([X[:2], X[2:]], layout=torch.jagged)
    test_arrays_that_are_no_numbers_are_refused(nested, r"x is a nested tensor.*to_padded_tensor")


def test_users_own_kernels_get_tensors() -> None:
    class Plain(tg.Kernel):
        def prepare(self, x, memory=None):
            assert isinstance(x, torch.Tensor)
            return x

        def pair(self, a, b, workspace=None):
            return a @ b.T

        def spec(self):
            return {"kernel": "plain"}

    assert torch.equal(Plain()(WIDE.numpy()), WIDE @ WIDE.T)
    tg.testing.check_kernel(Plain(), WIDE.numpy())
    tg.testing.check_kernel(tg.trace_ntk(MODEL), WIDE.numpy(), tolerance=1e-4)


@pytest.mark.parametrize("y", [Y, Y.numpy(), Y.tolist(), Y.int().numpy(), Y.to(torch.uint8), Y.numpy().astype(">i8")])
@pytest.mark.every(3)
def test_labels_of_any_width(y: object) -> None:
    gram = tg.compute(tg.trace_ntk(MODEL), X)
    expected = tg.regress.logistic(gram, Y, reg=1.0)
    assert torch.equal(tg.regress.logistic(gram, y, reg=1.0).model.coefficients, expected.model.coefficients)
    fit = tg.surrogate.fit(gram, y, progress=False)
    assert torch.equal(fit.coefficients, tg.surrogate.fit(gram, Y, progress=False).coefficients)
    step = tg.dynamics.learning_path(MODEL, WIDE.numpy(), X, y, lr=0.1)
    assert torch.equal(step.change, tg.dynamics.learning_path(MODEL, X, X, Y, lr=0.1).change)


def test_targets_in_every_form() -> None:
    gram, y = tg.compute(tg.trace_ntk(MODEL, dtype="float64"), X), WIDE[:, 0]
    expected = tg.regress.ridge(gram, y, reg=0.5).coefficients
    for given in (y.numpy(), y.tolist(), y.numpy()[::-1].copy()[::-1], y.numpy().astype(">f8")):
        assert torch.equal(tg.regress.ridge(gram, given, reg=0.5).coefficients, expected)
        assert torch.equal(tg.linalg.solve(gram, given, reg=0.5).value, expected)
        assert torch.equal(tg.dynamics.flow(gram, given).at([1.0]).train, tg.dynamics.flow(gram, y).at([1.0]).train)
    # A list has no type: float32 stays float32. An array of float64 asks for float64.
    narrow = tg.compute(tg.trace_ntk(MODEL), X)
    assert tg.regress.ridge(narrow, y.tolist(), reg=0.5).coefficients.dtype == torch.float32
    assert tg.regress.ridge(narrow, y.numpy(), reg=0.5).coefficients.dtype == torch.float64


def test_training_and_studies_take_arrays() -> None:
    def run(x, y):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        model.load_state_dict(START)
        sgd = {"loss": nn.functional.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
        return tg.dynamics.train(model, x, y, steps=3, x_test=x, progress=False, **sgd).loss

    START = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).state_dict()
    assert torch.equal(run(WIDE.numpy(), WIDE[:, :1].numpy()), run(X, X[:, :1]))
    shares = [
        tg.dynamics.one_step(MODEL, x, x[:4], y, loss=nn.functional.mse_loss, lr=0.1)
        for x, y in ((X, X[:4]), (WIDE.numpy(), WIDE[:4].numpy()), (X, X[:4].tolist()))
    ]
    assert torch.equal(shares[0], shares[1])
    assert torch.equal(shares[0], shares[2])
    monitor = tg.dynamics.Monitor(tg.trace_ntk(MODEL), WIDE.numpy())
    monitor(0)
    for f in (tg.infinite.empirical_ntk, tg.infinite.empirical_nngp, tg.infinite.readout_nngp):
        assert torch.equal(f(MODEL, WIDE.numpy()), f(MODEL, X))
    net = tg.models.mlp([3, 4, 3])
    tg.models.fit(net, WIDE.numpy(), Y.numpy().astype(np.int16), epochs=1, progress=False)
    assert tg.models.accuracy(net, WIDE.numpy(), Y.numpy()) == tg.models.accuracy(net, X, Y)


def test_explain_takes_arrays_of_any_width() -> None:
    options = {"kernels": ["CK"], "progress": False}
    runs = [
        tg.explain(MODEL, (x[:6], y[:6]), (x[6:], y[6:]), **options)
        for x, y in ((X, Y), (WIDE.numpy(), Y.numpy()), (WIDE, Y.tolist()), (X.numpy(), Y.to(torch.uint8).numpy()))
    ]
    for run in runs[1:]:
        assert torch.equal(run.logits, runs[0].logits)
        assert run.explanations[0].faithfulness.tau == runs[0].explanations[0].faithfulness.tau


def test_a_store_knows_the_same_samples_in_any_form(tmp_path: Path) -> None:
    k = tg.trace_ntk(MODEL)
    tg.compute(k, X, store=tmp_path / "k")
    for same in (X.numpy(), np.asfortranarray(X.numpy()), X.numpy().astype(">f4")):
        assert tg.compute(k, same, store=tmp_path / "k").shape == (9, 9)
    with pytest.raises(tg.StoreMismatch, match="x1"):
        tg.compute(k, WIDE, store=tmp_path / "k")


def test_compute_names_the_argument() -> None:
    for given, message in (
        (np.ma.masked_array(X.numpy()), r"^x1 is a masked array, .*: x1.filled\(…\)"),
        ({"a": np.ma.masked_array(X.numpy())}, r"^x1\['a'\] is a masked array, .*: x1\['a'\].filled\(…\)"),
        (X.numpy().astype(np.longdouble), r"^x1 is an array of float128, .*such as x1.astype\(np.float32\)"),
        (X.to_sparse(), r"^x1 is a sparse tensor; needed: a dense one, x1.to_dense\(\)"),
        (pytest.importorskip("scipy.sparse").csr_matrix(X.numpy()), r"^x1 is a csr_matrix; .*: x1.toarray\(\)"),
        (list(X), r"^Sequential.forward\(\) takes \(input\); x has 9 inputs. Of a list of samples"),
    ):
        with pytest.raises(tg.InputError, match=message):
            tg.compute(tg.trace_ntk(MODEL), given)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_samples_are_refused() -> None:
    with pytest.raises(tg.InputError, match=r"x is a quantized tensor; needed: its numbers, x.dequantize\(\)"):
        tg.trace_ntk(MODEL)(torch.quantize_per_tensor(X, 0.1, 0, torch.qint8))
