"""Without any optional library everything imports and computes, and what needs one says which and how to get it."""

import subprocess
import sys
from pathlib import Path

import pytest
from forked import FORK

import tangency as tg
from tangency._base.extras import EXTRA_OF, is_installed, needed
from tangency._base.triton import load_kernels

BLOCKED = """
import sys
for name in [{names}, "jaxtyping", "beartype", "transformers", "triton", "pandas", "threadpoolctl",
             "pytorch_lightning"]:
    sys.modules[name] = None
import inspect, tempfile
import torch
import tangency as tg
from tangency.cli import main

folder = tempfile.mkdtemp()
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
x = torch.randn(30, 3)
y = (x[:, 0] > 0).long()
kernel = tg.trace_ntk(model)
"""
WORKS = """
gram = tg.compute(kernel, x)
assert torch.allclose(gram.dense(), kernel(x))
assert tg.infinite_ntk(model)(x).shape == (30, 30)
assert tg.linearize(model)(x).shape == (30, 2)
tg.regress.ridge(gram, y.double(), reg=1.0)
found = tg.explain(model, (x, y), (x, y), kernels=["trNTK", "CK"])
tg.report.write(found, folder)
pictures = torch.rand(30, 1, 9, 9)
cnn = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(98, 2))
tg.report.write(tg.explain(cnn, (pictures, y), (pictures, y), kernels=["CK"]), folder)
assert tg.doctor().healthy
assert all(extra.missing for extra in tg.doctor().extras.values())
assert main(["doctor"]) == 0
"""
MISSING = """
def refused(call, words):
    try:
        call()
    except tg.MissingLibrary as e:
        assert str(e).endswith(words + "."), (str(e), words)
        assert isinstance(e, ModuleNotFoundError) and isinstance(e, tg.TangencyError)
        return
    raise AssertionError(f"nothing was refused: {words}")

store, zarr = "needs google-crc32c: pip install 'tangency[store]'", "needs zarr: pip install 'tangency[store]'"
refused(lambda: tg.compute(kernel, x, store=folder + "/gram"), store)
refused(lambda: tg.compute(kernel, x, store="memory://gram"), zarr)
refused(lambda: tg.open_gram({}), zarr)
refused(lambda: tg.explain(model, (x, y), (x, y), kernels=["CK"], store=folder + "/grams"), store)
refused(lambda: tg.projected(kernel, 4).features(x, store=folder + "/features"), store)
refused(lambda: tg.RayExecutor(), "RayExecutor needs Ray: pip install 'tangency[ray]'")
sklearn = "needs scikit-learn: pip install 'tangency[sklearn]'"
refused(lambda: tg.estimators, "tangency.estimators " + sklearn)
refused(lambda: __import__("tangency.estimators"), "tangency.estimators " + sklearn)
refused(lambda: tg.datasets.digits(), "digits() " + sklearn)
refused(lambda: tg.datasets.folder(folder), "folder() needs Pillow: pip install 'tangency[report]'")
refused(lambda: tg.datasets.frame(None, "y"), "frame() needs pandas: pip install 'tangency[pandas]'")
refused(lambda: tg.datasets.parquet("t.parquet", "y"), "parquet() needs pyarrow: pip install 'tangency[parquet]'")
scipy = "needs SciPy: pip install 'tangency[dynamics]'"
refused(lambda: tg.compute(kernel, x).to_scipy(), "to_scipy() " + scipy)
square = lambda f, y: ((f - y) ** 2).sum()
targets = y.double()[:, None]
K = kernel(x).double()
refused(lambda: tg.dynamics.integrate(K, targets, [0.0, 1.0], loss=square, progress=False), "integrate() " + scipy)
monitor = tg.dynamics.Monitor(kernel, x)
lightning, transformers = (f"needs {name}: pip install 'tangency[{name}]'" for name in ("lightning", "transformers"))
refused(lambda: tg.dynamics.lightning_callback(monitor), "lightning_callback() " + lightning)
refused(lambda: tg.dynamics.trainer_callback(monitor), "trainer_callback() " + transformers)
matplotlib = "a picture needs matplotlib: pip install 'tangency[plots]'"
for name, draw in vars(tg.plots).items():
    if name.startswith("draw_"):
        plain = [p for p in inspect.signature(draw).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
        refused(lambda: draw(*[None for p in plain if p.default is p.empty]), matplotlib)
refused(lambda: tg.explain(model, (x, y), (x, y), kernels=["CK"]).plot(), matplotlib)
from tangency.experiments import EXPERIMENTS
from tangency.experiments.table import Options
for experiment in EXPERIMENTS.values():
    if experiment.name.startswith(("spectra-", "anisotropy", "conjugate-", "single-relu")):  # they draw their data
        continue
    missing = transformers if experiment.name == "last-layer" else sklearn  # it makes its sentences
    refused(lambda: experiment.run(Options(quick=True, seeds=1, progress=False)), missing)
assert main(["demo", "--out", folder]) == 2

own = tg.trace_ntk(torch.nn.Sequential(model), outputs=lambda out: out)
try:
    with tg.Workers(1) as workers:
        tg.compute(own, x, executor=workers)
except tg.InputError as e:
    assert "pip install 'tangency[workers]'" in str(e)
else:
    raise AssertionError("a lambda travelled without cloudpickle")
print("refused")
"""


def test_without_any_of_them(tmp_path: Path) -> None:
    """What needs none works, and every function that needs one says so."""
    code = BLOCKED.replace("{names}", ", ".join(map(repr, EXTRA_OF))) + WORKS + MISSING
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "refused"
    assert "error: digits() needs scikit-learn: pip install 'tangency[sklearn]'.\n" in done.stderr


def test_estimators_are_imported_when_they_are_asked_for() -> None:
    with FORK.Pool(1) as pool:
        pool.apply(_import_estimators)


def _import_estimators() -> None:
    assert "sklearn" not in sys.modules
    assert "estimators" in dir(tg)
    assert tg.estimators.KernelRegressor is sys.modules["tangency.estimators"].KernelRegressor
    assert "sklearn" in sys.modules
    assert not hasattr(tg, "estimator")


def test_a_library_that_fails_keeps_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed and broken, installed without what it needs itself, and of a version that lacks a part."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for library, text, module, why in [
        ("zarr", "raise ImportError('libblosc.so: no such file')", "zarr", "libblosc.so"),
        ("ray", "import nothing_of_that_name", "ray", "nothing_of_that_name"),
        ("matplotlib", "", "matplotlib.figure", "matplotlib.figure"),
    ]:
        for name in [n for n in sys.modules if n.partition(".")[0] == library]:
            monkeypatch.delitem(sys.modules, name)
        (tmp_path / library).mkdir()
        (tmp_path / library / "__init__.py").write_text(text, encoding="utf-8")
        with pytest.raises(ImportError, match=why) as e, needed(library, "this"):
            __import__(module)
        assert not isinstance(e.value, tg.MissingLibrary)


def test_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed("torch")
    assert not is_installed("nothing_of_that_name")
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert not is_installed("tqdm")


def test_triton_may_be_missing_and_may_not_be_broken_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "triton", None)
    (tmp_path / "kernels_of_triton.py").write_text("import triton", encoding="utf-8")
    (tmp_path / "kernels_of_old.py").write_text("raise ImportError('wants libcuda')", encoding="utf-8")
    assert load_kernels("kernels_of_triton") is None
    with pytest.warns(tg.PerformanceWarning, match=r"Triton is installed and cannot be used \(wants libcuda\)"):
        assert load_kernels("kernels_of_old") is None
