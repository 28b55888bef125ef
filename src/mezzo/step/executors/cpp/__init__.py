"""Both passes on the CPU, in C++: ``source`` writes the kernels, ``build`` compiles them, ``launch`` calls them."""
