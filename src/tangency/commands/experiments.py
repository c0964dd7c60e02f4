"""`tangency reproduce`: published tables, measured again."""

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from ..experiments.catalogue import EXPERIMENTS, LEARNERS, NETWORKS
from .options import add_output, indices, names, positive, say

if TYPE_CHECKING:
    from ..experiments.table import Regression, Trainings
    from .options import Commands


def add(commands: "Commands") -> None:
    """Enter this command."""
    reproduce = commands.add_parser(
        "reproduce",
        help="a published table, measured again: " + ", ".join(EXPERIMENTS),
        description="Measure a published table again and print ours beside it.\n\n"
        + "\n".join(f"  {e.name}\n    {e.title}\n    {e.needs}" for e in EXPERIMENTS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    reproduce.add_argument("name", choices=list(EXPERIMENTS), metavar="NAME", help="which (see above)")
    reproduce.add_argument("--data", type=Path, help="the folder with the official files of the data sets")
    reproduce.add_argument(
        "--out", type=Path, help="folder for what is finished: the same command goes on where it was stopped"
    )
    reproduce.add_argument("--quick", action="store_true", help="small, on bundled data, under a minute: does it run?")
    reproduce.add_argument(
        "--seeds",
        type=positive,
        default=3,
        help="networks to train (surrogate-table1, energy-table1, spectra-table8), repeats of folds (uci); default: 3",
    )
    reproduce.add_argument(
        "--kernels", type=names, default=(), help="some of the kernels, with commas (tables 2, 3; cntk: ntk, nngp)"
    )
    reproduce.add_argument("--samples", type=positive, help="training samples (cntk, and those below)")
    reproduce.add_argument("--test", type=positive, help="test samples (likewise)")
    reproduce.add_argument(
        "--device", dest="where", help="cpu, cuda, cuda:1 (likewise; default: a GPU where there is one)"
    )
    with_cases = ", ".join(e.name for e in EXPERIMENTS.values() if "cases" in e.takes)
    reproduce.add_argument("--cases", type=names, help=f"some of the rows, with commas ({with_cases})")
    _cntk_options(reproduce)
    _learned_options(reproduce)
    add_output(reproduce)
    reproduce.set_defaults(run=_reproduce, long=True, refuse=reproduce.error)


def _cntk_options(reproduce: argparse.ArgumentParser) -> None:
    """None where they are not given: for another experiment they are refused."""
    cntk = reproduce.add_argument_group("cntk alone")
    cntk.add_argument("--network", choices=NETWORKS, help="(default: cntk, 11 convolutions and a global average)")
    cntk.add_argument("--flips", action="store_true", default=None, help="add the mirror image of every training image")
    cntk.add_argument("--whiten", action="store_true", default=None, help="ZCA, by the training images (as for Myrtle)")
    cntk.add_argument("--dtype", choices=["float32", "float64"], help="(default: float32)")
    cntk.add_argument("--store", type=Path, help="a folder for the Grams, to go on with (default: one in --out)")


def _learned_options(reproduce: argparse.ArgumentParser) -> None:
    """None where they are not given."""
    learned = reproduce.add_argument_group(", ".join(e.name for e in EXPERIMENTS.values() if "networks" in e.takes))
    learned.add_argument("--networks", type=names, help=f"some of {', '.join(LEARNERS)}, with commas")
    learned.add_argument("--sets", type=names, help="mnist, cifar10 (eigenfunctions)")
    learned.add_argument("--indices", type=indices, help="which eigenfunctions or directions, from 0, with commas")
    learned.add_argument("--epochs", type=positive, help="(default: as published)")


def _own_options(args: argparse.Namespace) -> tuple["Regression", "Trainings"]:
    """Of this experiment; what it does not take is refused."""
    from dataclasses import fields

    from ..experiments.table import Regression, Trainings

    kinds = (Regression, Trainings)
    every = {f.name: None for kind in kinds for f in fields(kind)} | {"where": None, "cases": None}
    given = {name: value for name in every if (value := getattr(args, name)) is not None}
    for name in given:
        if name not in EXPERIMENTS[args.name].takes:
            takers = ", ".join(e.name for e in EXPERIMENTS.values() if name in e.takes)
            raise InputError(f"--{name.replace('where', 'device')} is for {takers}; {args.name} does not take it.")
    regression, trainings = ({f.name: given[f.name] for f in fields(kind) if f.name in given} for kind in kinds)
    return Regression(**regression), Trainings(**trainings)


def _check_device(args: argparse.Namespace) -> None:
    """Torch must have it here; the parser, which could not ask, refuses it as it does what is no number."""
    import torch

    try:
        torch.zeros(1, device=args.where).item()  # "meta" is a device, too, and has no numbers
    except (RuntimeError, AssertionError) as e:  # no such device, or a torch without it
        args.refuse(f"argument --device: {args.where}: {str(e).partition(chr(10))[0]}")


def _reproduce(args: argparse.Namespace) -> int:
    from .._base import strict_json
    from .._base.files import writable, write
    from ..experiments.table import Options

    if args.where is not None:
        _check_device(args)
    regression, learned = _own_options(args)
    if args.quick and args.data is not None:
        raise InputError(f"--data {args.data} and --quick, which runs on bundled data; give one of the two.")
    basic = (args.data, args.out, args.quick, args.seeds, args.kernels, args.cases or (), not args.quiet)
    options = Options(*basic, args.where, regression, learned)
    kept = None
    if args.out is not None:
        kept = writable(args.out / f"{args.name}{'-quick' if args.quick else ''}-table.json", "--out")
    begin = time.perf_counter()
    table = EXPERIMENTS[args.name].run(options)
    command = shlex.join(["tangency", *sys.argv[1:]])
    record = {**table.to_dict(), "command": command, "seconds": time.perf_counter() - begin}
    if kept is not None:
        write(kept, strict_json.text(record, 1) + "\n")
    say(strict_json.text(record, 2) if args.json else table.table())
    return 0
