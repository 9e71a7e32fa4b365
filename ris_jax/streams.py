"""The random streams of the published geometry, bit for bit, from NumPy alone.

The published program draws its samples with PyTorch's CPU generator: a Mersenne Twister (MT19937) seeded the way Knuth
seeds it, whose raw 32-bit outputs u are used plainly:

    integers below H     u mod H, one output each; for H >= 2**28 two outputs, (u1·2**32 + u2) mod H
    permutation of n     r = 0 … n-1; for i = 0 … n-2 swap r[i] with r[i + u mod (n-i)]

NumPy has the same generator. Only its frozen part is used here (`RandomState`, whose streams are fixed for good, and
raw outputs), so that a geometry does not change with the version of NumPy. A stream cannot be entered at random, but
outputs that are not wanted are skipped without being made into numbers (about 2 ns each).
"""

import numpy as np

MAX_PERMUTATION = (2**32 - 1) // 20
"""Permutations of this many and more are drawn differently by PyTorch."""

_TWO_OUTPUTS = 2**28


class Stream:
    """One generator, from its seed onwards. It is mutable: every draw continues where the last one ended."""

    def __init__(self, seed: int):
        """Seeds the generator.

        Args:
            seed: any integer; only its lowest 32 bits count, as in the published program.
        """
        self._bits = np.random.MT19937()
        self._bits.state = np.random.RandomState(seed % 2**32).get_state(legacy=False)
        self._random = np.random.RandomState(self._bits)

    def raw(self, count: int) -> np.ndarray:
        """The next raw outputs.

        Args:
            count: how many.

        Returns:
            uint32 [count].
        """
        # Over the full range of the type an integer is an output as it stands.
        return self._random.randint(0, 2**32, count, dtype=np.uint32)

    def skip(self, count: int) -> None:
        """Leaves raw outputs out.

        Args:
            count: how many.
        """
        if count:
            self._bits.random_raw(count, output=False)

    def integers(self, high: int, count: int) -> np.ndarray:
        """Integers below `high`, with repetition, as the published program draws them (`torch.randint`).

        Args:
            high: exclusive end, 1 … 2**63 - 1.
            count: how many.

        Returns:
            int64 [count].

        Raises:
            ValueError: `high` out of range.
        """
        outputs = count * outputs_per_integer(high)
        if high < _TWO_OUTPUTS:
            u = self.raw(outputs)
            # u - (u // H)·H is u mod H: NumPy divides by a scalar with SIMD, but has no such remainder.
            quotient = u // np.uint32(high)
            quotient *= np.uint32(high)
            u -= quotient
            return u.astype(np.int64)
        u = self.raw(outputs).astype(np.uint64).reshape(count, 2)
        return (((u[:, 0] << np.uint64(32)) | u[:, 1]) % np.uint64(high)).astype(np.int64)

    def permutation(self, n: int) -> np.ndarray:
        """A random order of 0 … n-1, as the published program draws it (`torch.randperm`). Uses n-1 outputs.

        Args:
            n: how many, below `MAX_PERMUTATION`.

        Returns:
            int32 [n].

        Raises:
            ValueError: `n` out of range.
        """
        if not 1 <= n < MAX_PERMUTATION:
            raise ValueError(f"A permutation of {n} is not drawn this way; the range is 1 … {MAX_PERMUTATION - 1}.")
        partners = self.raw(n - 1) % np.arange(n, 1, -1, dtype=np.uint32) + np.arange(n - 1, dtype=np.uint32)
        # Each swap depends on those before it; lists of Python integers are the fastest loop there is (15 ms at 64k).
        order = list(range(n))
        for i, j in enumerate(partners.tolist()):
            order[i], order[j] = order[j], order[i]
        return np.array(order, np.int32)


def outputs_per_integer(high: int) -> int:
    """How many raw outputs one integer below `high` takes.

    Args:
        high: exclusive end, 1 … 2**63 - 1.

    Returns:
        1 or 2.

    Raises:
        ValueError: `high` out of range.
    """
    if not 1 <= high < 2**63:
        raise ValueError(f"high = {high} must be within 1 … 2**63 - 1.")
    return 1 if high < _TWO_OUTPUTS else 2
