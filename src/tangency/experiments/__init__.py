"""Published tables and figures, each by one command: `tangency reproduce NAME`."""

from typing import TYPE_CHECKING

from .._base.on_demand import import_on_demand
from .catalogue import EXPERIMENTS, Experiment

if TYPE_CHECKING:  # tables hold what torch computes, the catalogue is for --help
    from .table import Table

__all__ = ["EXPERIMENTS", "Experiment", "Table"]

import_on_demand(__name__)
