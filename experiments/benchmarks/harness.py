"""What every benchmark needs: cores, interleaved timing, this machine's own rates.

Nothing here imports JAX at the top, because `use_threads` must run before it is imported.
"""

import dataclasses
import os
import pathlib
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Sequence


def use_threads(threads: str) -> int:
    """Binds the process to cores; call it before JAX or torch is imported: both size their pools by what they find.

    Args:
        threads: "all", or a number of cores.

    Returns:
        How many cores the process may use.

    Raises:
        ValueError: not "all" and not a number of cores that this machine has.
    """
    cores = sorted(os.sched_getaffinity(0))
    if threads == "all":
        return len(cores)
    if not threads.isdecimal() or not 1 <= int(threads) <= len(cores):
        raise ValueError(f"--threads={threads!r} must be 'all' or a number of cores from 1 to {len(cores)}.")
    # The last ones: on small machines the first core serves most interrupts.
    os.sched_setaffinity(0, cores[-int(threads) :])
    return int(threads)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of repeated calls.

    Attributes:
        wall: median wall clock of one call, what a user waits.
        best: the fastest call, what the machine can do when nothing else runs.
        cpu: median of the processor time of all threads, which other processes disturb least.
    """

    wall: float
    best: float
    cpu: float


def interleave(
    tasks: dict[str, Callable[[], object]],
    *,
    rounds: int,
    progress: Callable[[Iterable], Iterable] = iter,
    seconds: float = 120.0,
) -> dict[str, Timing]:
    """Times tasks in turn, A B C A B C: a busy machine then disturbs all alike, and their ratios mean something.

    Args:
        tasks: by name; each runs once, to its end. Warm them up before.
        rounds: how often each runs.
        progress: wraps the rounds, for a progress bar.
        seconds: no further round starts after so long; two always run.

    Returns:
        The timing of each.
    """
    laps = {name: [] for name in tasks}
    start = time.perf_counter()
    for index in progress(range(rounds)):
        if index >= 2 and time.perf_counter() - start > seconds:
            break
        for name, task in tasks.items():
            cpu, wall = time.process_time(), time.perf_counter()
            task()
            laps[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    median = statistics.median
    return {
        name: Timing(wall=median(w for w, _ in lap), best=min(w for w, _ in lap), cpu=median(c for _, c in lap))
        for name, lap in laps.items()
    }


def first_call(task: Callable[[], object]) -> float:
    """Seconds of one call: of the first, mostly compilation."""
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def peak_rss_mb() -> float:
    """The most memory this process has held so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def machine() -> dict[str, object]:
    """Processor, cores and load: without them no number means anything."""
    fields = dict.fromkeys(("model name", "flags"), "")
    path = pathlib.Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() in fields:
            fields[name.strip()] = value.strip()
    matrix = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in fields["flags"].split()]
    return {
        "processor": fields["model name"] or platform.processor(),
        "instructions": matrix,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


@dataclasses.dataclass(frozen=True)
class Rates:
    """What this machine reached in this run, at its best.

    Attributes:
        matmul: GFLOP/s of the best matrix product by dtype name.
        read: GB/s of reading weights in float32 products of one row, in the largest of which nothing stays in a cache.
        copy: GB/s moved (read and written) by copying an array into a buffer that is already there.
    """

    matmul: dict[str, float]
    read: float
    copy: float


def measure_rates(shapes: Sequence[tuple[int, int, int]], *, rounds: int = 5, megabytes: int = 112) -> Rates:
    """Measures the machine, through XLA.

    Args:
        shapes: (M, K, N) of the products to try.
        rounds: calls of each.
        megabytes: size of the array that is copied, and of the weights that are read.

    Returns:
        The best rates.
    """
    import jax
    import jax.numpy as jnp

    def best(function, *args, donate=()):
        function = jax.jit(function, donate_argnums=donate)
        laps = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            result = jax.block_until_ready(function(*args))
            laps.append(time.perf_counter() - start)
            # A donated buffer is replaced by the result that took its place.
            args = (*args[:-1], result) if donate else args
        return min(laps[1:])

    def product(a, b):
        return jnp.matmul(a, b, preferred_element_type=jnp.float32)

    matmul = {}
    for dtype in ("float32", "bfloat16"):
        rates = []
        for m, k, n in shapes:
            a, b = jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)
            rates.append(2 * m * k * n / best(product, a, b) / 1e9)
        matmul[dtype] = max(rates)
    width = 1024
    weights = jnp.ones((width, megabytes * 2**20 // 4 // width))
    read = weights.nbytes / best(product, jnp.ones((1, width)), weights) / 1e9
    # In place, x -> x + 1: a fresh result would measure the page faults of its memory instead.
    copy = 2 * weights.nbytes / best(lambda x: x + 1, weights, donate=(0,)) / 1e9
    return Rates(matmul=matmul, read=read, copy=copy)
