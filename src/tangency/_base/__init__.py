"""What every room stands on: types, trees of inputs, checks, progress, memory."""

from .on_demand import import_on_demand

import_on_demand(__name__)
