"""What --quick runs on: scikit-learn's digits, as images of the size and channels that a network expects."""

from torch import Tensor, nn

from ..datasets import Labelled, TrainTest, digits


def images(factor: int, channels: int = 3, train: int = 50, test: int = 30) -> TrainTest:
    """(train, test) of digits, so many of each, every pixel repeated factor x factor times."""

    def enlarged(data: Labelled) -> Labelled:
        """Each pixel factor x factor times, the same in every channel."""
        assert isinstance(data.x, Tensor)
        return data.with_x(nn.functional.interpolate(data.x, scale_factor=factor).repeat(1, channels, 1, 1))

    known, asked = digits()
    return TrainTest(enlarged(known.take(per_class=train)), enlarged(asked.take(per_class=test)))
