"""Power-law graph attention and its neighbours as pure JAX functions, Flax modules and a laboratory."""
