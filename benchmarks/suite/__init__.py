"""The paper's families: each script of ``examples/families`` compared under every policy, and its numbers looked at."""
