"""From a module and inputs to per-sample gradients, and from these to entries of a Gram matrix."""

from .._base.on_demand import import_on_demand

import_on_demand(__name__)
