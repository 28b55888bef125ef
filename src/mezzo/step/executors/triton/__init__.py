"""Both passes on a GPU, in Triton: ``source`` writes the kernels, ``launch`` calls them."""
