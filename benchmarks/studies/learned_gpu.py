"""Eigenfunctions, energies and anisotropy directions at their published sizes, and what a monitor costs, on one GPU.

    python3 benchmarks/studies/learned_gpu.py --data DIR --out OUT --seconds 540   # DIR: cifar-10-batches-bin, mnist
    python3 benchmarks/studies/learned_gpu.py --data DIR --out OUT --smoke         # the same, tiny: does it run?

Eight trainings at a time share the card, by NVIDIA's multi-process service where it starts; then, alone, the monitor
and the time of a step. Each part is a process with a log in OUT/logs; what it has finished when time is up is in its
record, and the driver goes on where it was if called again with the same OUT. At the end OUT/summary.json says what
came of each part, and OUT/learned_gpu.tar.gz holds everything. torch and numpy are all that is needed.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ALONE = 180.0  # seconds that are kept for what must have the card to itself
INDICES = "10,1000,100,3,300,30"  # in the order in which they are learned
DIRECTIONS = "0,2000,300,30,1000,100,10,3"
RESNET_EPOCHS = 30  # along its directions; published: 100


@dataclass
class Part:
    """A process: what it runs, what must be there before it starts, whether it wants the card to itself."""

    name: str
    arguments: list[str]
    after: "tuple[Part, Path] | None" = None  # another, and its record
    alone: bool = False
    process: "subprocess.Popen[bytes] | None" = None
    times: dict[str, float] = field(default_factory=dict)

    def start(self, out: Path, environment: dict[str, str], begun: float) -> None:
        """Begin, with a log."""
        with (out / "logs" / f"{self.name}.log").open("ab") as log:
            command = [sys.executable, *self.arguments]
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.times["started"] = time.monotonic() - begun

    def ready(self, begun: float) -> bool:
        """Whether what it waits for is over, or past its Gram: its record has eigenvalues, written in this run."""
        if self.after is None:
            return True
        part, record = self.after
        if part.process is None:
            return False
        if part.process.poll() is not None:
            return True
        recent = record.exists() and record.stat().st_mtime > time.time() - (time.monotonic() - begun)
        return recent and '"values"' in record.read_text(encoding="utf-8")

    def over(self, begun: float) -> bool:
        """Whether it is; notes when it ended."""
        if self.process is None or self.process.poll() is None:
            return False
        self.times.setdefault("ended", time.monotonic() - begun)
        return True

    def ask(self, begun: float) -> None:
        """To end, as Ctrl-C does: a process that is killed in the midst can take its service along."""
        if self.process is not None and self.process.poll() is None:
            self.times["stopped"] = time.monotonic() - begun
            self.process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """End it, if it runs still."""
        if self.process is not None:
            for end in (self.process.terminate, self.process.kill):
                try:
                    self.process.wait(6)
                    return
                except subprocess.TimeoutExpired:
                    end()
            self.process.wait()


def parts(args: argparse.Namespace) -> list[Part]:
    """All of them, or those of --parts."""
    out, smoke = args.out, args.smoke
    common = ["--data", str(args.data), "--device", args.device, "--quiet"]

    def reproduce(name: str, folder: str, *more: str) -> list[str]:
        """The command line of an experiment with its own folder."""
        given = ["-m", "tangency", "reproduce", name, "--out", str(out / folder), *more]
        return [*given, *(common if name != "anisotropy" else common[2:])]

    def own(what: str, *more: str) -> list[str]:
        """A function of this file."""
        here = ["benchmarks/studies/learned_gpu.py", "--work", what, "--out", str(out), "--data", str(args.data)]
        return [*here, "--device", args.device, *more, *(["--smoke"] if smoke else [])]

    found: list[Part] = []
    for where in ("cifar10", "mnist"):
        for network in ("lenet", "mlp"):
            folder = f"eigenfunctions-{where}-{network}"
            few = ["--indices", "3,10", "--epochs", "2", "--samples", "400", "--test", "100"]
            if smoke and network == "mlp" and where == "mnist" and args.device != "cpu":
                few[-3], few[-1] = "7500", "1000"  # enough for the iteration that is used at full size
            size = few if smoke else ["--indices", INDICES]
            given = reproduce("eigenfunctions", folder, "--sets", where, "--networks", network, *size)
            # Two Grams of 29 GB at a time: that of the MLP after that of LeNet.
            record = out / f"eigenfunctions-{where}-lenet" / "eigenfunctions.json"
            first = found[-1] if network == "mlp" and wanted(args, found[-1]) else None
            found.append(Part(folder, given, None if first is None else (first, record)))
    small = ["--samples", "400", "--test", "100", "--epochs", "2"] if smoke else []
    seeds = ["--seeds", "1" if smoke else "3"]
    given = reproduce("energy-table1", "energy-small", "--networks", "mlp,lenet", *seeds, *small)
    found += [Part("energy-small", given), Part("energy-resnet18", own("energy", "--seconds", str(args.resnet)))]
    size = ["--samples", "200", "--test", "100", "--epochs", "2", "--indices", "0,3"] if smoke else []
    many = size or ["--indices", "0,3,10,30,100,300,1000"]
    found.append(Part("anisotropy-lenet", reproduce("anisotropy", "anisotropy-lenet", "--networks", "lenet", *many)))
    many = size or ["--indices", DIRECTIONS, "--epochs", str(RESNET_EPOCHS)]
    if args.device != "cpu":
        given = reproduce("anisotropy", "anisotropy-resnet18", "--networks", "resnet18", *many)
        found.append(Part("anisotropy-resnet18", given))
    found.append(Part("steps", own("steps"), alone=True))
    options = {"width": 64, "size": 32, "batch": 128, "probe": 200, "steps": 6000, "seconds": 130}
    if smoke:
        options |= {"probe": 20, "steps": 40} | ({"width": 4, "size": 8, "batch": 8} if args.device == "cpu" else {})
    listed = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    given = ["-m", "benchmarks.speed.monitor", *listed, "--device", args.device, "--out", str(out / "monitor.json")]
    found.append(Part("monitor", given, alone=True))
    return [part for part in found if wanted(args, part)]


def wanted(args: argparse.Namespace, part: Part) -> bool:
    """Whether --parts has it, or is left out."""
    return not args.parts or part.name in args.parts


@contextmanager
def shared_card(out: Path, environment: dict[str, str], asked: bool) -> Iterator[bool]:
    """NVIDIA's multi-process service, with which kernels of several processes run at a time; False where it is none."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or not asked:
        yield False
        return
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    folders = {name: str(out / "mps" / name[9:13].lower()) for name in names}
    for folder in folders.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    inside = environment | folders
    try:
        nowhere = subprocess.DEVNULL  # or the service would keep our output open
        subprocess.run([control, "-d"], env=inside, timeout=20, check=True, stdout=nowhere, stderr=nowhere)
        look = "import torch; print(float(torch.ones(3, device='cuda').sum()))"
        subprocess.run([sys.executable, "-c", look], env=inside, timeout=60, check=True)
    except (subprocess.SubprocessError, OSError) as e:
        print(f"no multi-process service ({e})", flush=True)
        quit_service(control, inside)
        yield False
        return
    environment.update(folders)
    try:
        yield True
    finally:
        quit_service(control, inside)
        for name in names:
            environment.pop(name, None)


def quit_service(control: str, environment: dict[str, str]) -> None:
    """Ask the service that was started here to end."""
    try:
        subprocess.run([control], input=b"quit\n", env=environment, timeout=20, check=False)
    except (subprocess.SubprocessError, OSError) as e:
        print(f"the multi-process service does not answer ({e})", flush=True)


def drive(args: argparse.Namespace) -> None:
    """All parts, then the summary and the archive."""
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    every = parts(args)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    alone = [part for part in every if part.alone]
    until = args.seconds - (0 if not alone else 15 if args.smoke else ALONE)
    mps = False
    try:
        with shared_card(args.out, environment, args.device != "cpu" and not args.no_mps) as mps:
            run([part for part in every if not part.alone], until, begun, args.out, environment)
        for part in alone:
            run([part], args.seconds, begun, args.out, environment)
    finally:
        end(every, begun)
        summarise(args.out, every, {"seconds": time.monotonic() - begun, "multi-process service": mps})


def run(waiting: list[Part], until: float, begun: float, out: Path, environment: dict[str, str]) -> None:
    """Start each as soon as it can, until all are over or time is up."""
    waiting, running = list(waiting), list[Part]()
    while waiting or running:
        if time.monotonic() - begun > until:
            end(running, begun)
            return
        for part in [p for p in waiting if p.ready(begun)]:
            part.start(out, environment, begun)
            waiting.remove(part)
            running.append(part)
        for part in [p for p in running if p.over(begun)]:
            running.remove(part)
            assert part.process is not None
            print(f"{part.times['ended']:.0f} s: {part.name} ended with {part.process.returncode}", flush=True)
        if waiting and not running:
            print(f"never started: {', '.join(part.name for part in waiting)}", flush=True)
            return
        time.sleep(0.2)


def end(running: list[Part], begun: float) -> None:
    """All that run, at once."""
    for part in running:
        part.ask(begun)
    for part in running:
        part.stop()


def summarise(out: Path, every: list[Part], facts: dict[str, Any]) -> None:
    """summary.json, and all records and logs in one archive."""
    said = {
        part.name: {
            "status": "not started" if part.process is None else part.process.returncode,
            **part.times,
            "command": "python3 " + " ".join(part.arguments),
        }
        for part in every
    }
    (out / "summary.json").write_text(json.dumps({**facts, "parts": said}, indent=1) + "\n", encoding="utf-8")
    with tarfile.open(out / "learned_gpu.tar.gz", "w:gz") as archive:
        for path in sorted(out.rglob("*")):
            if path.suffix in (".json", ".log", ".pt") and path.stat().st_size < 4 << 20:
                archive.add(path, str(path.relative_to(out)))
    print(json.dumps({name: row["status"] for name, row in said.items()}), flush=True)


def energy(args: argparse.Namespace) -> None:
    """ResNet18's row, with as many epochs as fit into --seconds by the time of one."""
    from tangency.experiments import EXPERIMENTS
    from tangency.experiments.energy_table1 import EPOCHS
    from tangency.experiments.learned import affordable, halves, learner, some_images
    from tangency.experiments.table import Options, Trainings
    from tangency.models import fit
    from tangency.studies import SCHEDULE

    n, m = (400, 100) if args.smoke else (50_000, 10_000)
    name = "narrow" if args.device == "cpu" else "resnet18"
    options = Options(data=args.data, where=args.device, progress=False)
    known = halves(some_images("cifar10", options, n, m).train)
    recipe = affordable(SCHEDULE.but(epochs=3, captured=True), name, options)
    begun = time.monotonic()
    past = fit(learner(name, (3, 32, 32), seed=1).to(args.device), known, None, recipe, progress=False)
    epoch = past.seconds / 3
    epochs = min(EPOCHS, max(1, int((args.seconds - (time.monotonic() - begun)) / epoch)))
    epochs = 2 if args.smoke else epochs
    print(f"an epoch takes {epoch:.2f} s beside the other parts: {epochs} epochs", flush=True)
    asked = Trainings(networks=(name,), samples=n, test=m, epochs=epochs)
    out = args.out / "energy-resnet18"
    table = EXPERIMENTS["energy-table1"].run(
        Options(data=args.data, out=out, where=args.device, seeds=1, progress=False, learned=asked)
    )
    (out / "epochs.json").write_text(
        json.dumps({"epochs": epochs, "published": EPOCHS, "seconds an epoch": epoch}), encoding="utf-8"
    )
    print(table.table())


def steps(args: argparse.Namespace) -> None:
    """Milliseconds of a step with and without a CUDA graph, alone on the card, and how far the weights differ."""
    import torch

    import tangency as tg
    from benchmarks.record import save
    from tangency.experiments.learned import affordable, learner
    from tangency.experiments.table import Options
    from tangency.studies import SCHEDULE

    options = Options(where=args.device)
    eigenpairs(args)
    n = 128 * (8 if args.smoke else 300)
    x = torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(0), device="cpu").to(args.device)
    y = (x.mean((1, 2, 3)) > 0).long()
    rows: dict[str, dict[str, float]] = {}
    for name in ("mlp", "lenet") if args.device == "cpu" else ("mlp", "lenet", "resnet18"):
        for linear in (False, True) if name != "resnet18" else (False,):
            row, ends = {}, []
            for captured in (False, True):
                model = learner(name, (3, 32, 32), seed=0).to(args.device)
                net = tg.linearize(model) if linear else model
                recipe = affordable(SCHEDULE.but(epochs=1, captured=captured), name, options)
                tg.models.fit(net, x[: 128 * 6], y[: 128 * 6], recipe, progress=False)  # what first use costs
                seconds = tg.models.fit(net, x, y, recipe, progress=False).seconds
                row["ms captured" if captured else "ms"] = 1000 * seconds / (n // 128)
                ends.append(torch.cat([p.detach().flatten().double() for p in net.parameters()]))
            row["relative difference of the weights"] = float((ends[1] - ends[0]).norm() / ends[0].norm())
            rows[f"{name}{', linearised' if linear else ''}"] = row
            print(name, linear, row, flush=True)
    what = "a step of SGD with momentum on 128 images 3x32x32 by tg.models.fit, with captured=True and without"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    save({"what": what, "rows": rows, "gpu": gpu}, args.out / "steps.json", "python3 " + " ".join(sys.argv))


def eigenpairs(args: argparse.Namespace) -> None:
    """Print how exact the card's products and eigenpairs in float32 are: a Gram's largest by default must be found."""
    import torch

    import tangency as tg

    g = torch.Generator().manual_seed(0)
    a = torch.randn(2000, 300, generator=g, dtype=torch.float64).to(args.device) + 1
    exact = a @ a.T
    off = (a.float() @ a.float().T).double() - exact
    print(f"product: off by {float(off.norm() / exact.norm()):.1e}", os.environ.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"))
    for size in (100, 300, 600):
        h = exact[:size, :size].float()
        values, vectors = torch.linalg.eigh(h)
        residual = (h @ vectors - vectors * values).norm(dim=0).max() / values.max()
        print(f"eigh of {size}: residual {float(residual):.1e}", flush=True)
    try:
        print(tg.linalg.top(exact.float(), 50, progress=False))
    except tg.DidNotConverge as e:
        print(f"top: {e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=None, help="of the whole (540; 60 for --smoke)")
    parser.add_argument("--resnet", type=float, default=200.0, help="seconds of the ResNet18's training for its energy")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--parts", nargs="*", default=[])
    parser.add_argument("--work", choices=("energy", "steps"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.data, args.out = args.data.resolve(), args.out.resolve()
    args.seconds = args.seconds or (60.0 if args.smoke else 540.0)
    if args.work:
        sys.path[:0] = [str(ROOT), str(ROOT / "src")]
        {"energy": energy, "steps": steps}[args.work](args)
    else:
        drive(args)


if __name__ == "__main__":
    main()
