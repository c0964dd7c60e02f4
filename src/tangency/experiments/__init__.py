"""Published tables and figures, each by one command: `tangency reproduce NAME`."""

from .anisotropy import ANISOTROPY
from .cntk import CNTK
from .conjugate import CONJUGATE
from .eigenfunctions import EIGENFUNCTIONS
from .energy_table1 import ENERGY_TABLE1
from .single_relu import SINGLE_RELU
from .spectra_table8 import SPECTRA_TABLE8
from .spectra_transition import SPECTRA_TRANSITION
from .surrogate_table1 import SURROGATE_TABLE1
from .surrogate_table2 import SURROGATE_TABLE2
from .surrogate_table3 import SURROGATE_TABLE3
from .table import Experiment, Table
from .uci import UCI

_ALL = (
    SURROGATE_TABLE1, SURROGATE_TABLE2, SURROGATE_TABLE3, UCI, CNTK, SPECTRA_TABLE8, SPECTRA_TRANSITION, EIGENFUNCTIONS,
    ENERGY_TABLE1, ANISOTROPY, *CONJUGATE, SINGLE_RELU,
)  # fmt: skip
EXPERIMENTS: dict[str, Experiment] = {e.name: e for e in _ALL}

__all__ = ["EXPERIMENTS", "Experiment", "Table"]
