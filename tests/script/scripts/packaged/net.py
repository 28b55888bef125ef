"""The model of the package."""

from torch import nn


class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
