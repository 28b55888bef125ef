"""The verbs that speak of the machine and not of a training."""
