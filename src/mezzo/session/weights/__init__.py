"""The models and optimizers of a session, converted as the policy says, with their FP32 weights by name."""
