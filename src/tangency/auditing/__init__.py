"""What a kernel says about data: wrong labels, copies, leaks, what nothing supports (from a network: `tg.audit`)."""

from .applied import apply
from .audit import audit_gram
from .choice import Choice
from .cleaning import Cleaning
from .copies import Copies
from .labels import NoiseRate, Suspects
from .regions import Region
from .result import Audit
from .support import Support

__all__ = ["Audit", "Choice", "Cleaning", "Copies", "NoiseRate", "Region", "Support", "Suspects", "apply", "audit_gram"]
