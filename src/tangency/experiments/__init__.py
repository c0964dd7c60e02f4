"""Published tables and figures, each by one command: `tangency reproduce NAME`."""

from tangency.experiments import surrogate_table1, surrogate_table2, surrogate_table3, uci
from tangency.experiments.table import Experiment, Table

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (surrogate_table1.EXPERIMENT, surrogate_table2.EXPERIMENT, surrogate_table3.EXPERIMENT, uci.EXPERIMENT)
}

__all__ = ["EXPERIMENTS", "Experiment", "Table"]
