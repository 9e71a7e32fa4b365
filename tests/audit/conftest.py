"""The small published model, as the tests of the models make it."""

from tests.models.conftest import published

__all__ = ["published"]
