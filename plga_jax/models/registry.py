"""The architectures by the name that checkpoints use: config class and model class."""

from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig

MODELS = {"pldr": (PLDRConfig, PLDR)}
