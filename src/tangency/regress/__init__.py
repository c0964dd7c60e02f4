"""From a Gram matrix to predictions: least squares, Gaussian processes, logistic regression, and how well they will do.

Every fit is a `KernelModel`; `model.predict(cross)` takes the Gram of the new samples with the training samples. All
minimise Σ_i w_i loss(f(x_i), y_i) + (reg/2)·‖f − f₀‖² with the square loss (f − y)²/2, or the logistic or softmax loss.
"""

from .gp import GaussianProcess, LeftOutProcess, Posterior, gaussian_process
from .leave_out import LeftOut, leave_out
from .leave_out_features import leave_out_features
from .leave_out_logistic import LeftOutLogistic, leave_out_logistic, leave_out_logistic_features
from .logistic_loss import LogisticModel, logistic, logistic_features
from .model import KernelModel
from .square_loss import least_squares, ridge, ridgeless
from .validate import Risks, RiskStudy, cross_validate, risk_study

__all__ = [
    "GaussianProcess",
    "KernelModel",
    "LeftOut",
    "LeftOutLogistic",
    "LeftOutProcess",
    "LogisticModel",
    "Posterior",
    "RiskStudy",
    "Risks",
    "cross_validate",
    "gaussian_process",
    "least_squares",
    "leave_out",
    "leave_out_features",
    "leave_out_logistic",
    "leave_out_logistic_features",
    "logistic",
    "logistic_features",
    "ridge",
    "ridgeless",
    "risk_study",
]
