"""A model under a policy: what is converted, at which modules' boundaries something is cast, and what is refused."""
