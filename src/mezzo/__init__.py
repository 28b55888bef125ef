"""mezzo trains PyTorch models in automatic mixed precision."""
