"""Says in what a run differs from the single process's, and what kind of mistake the numbers point at.

    diagnosis = diagnose(run, reference, axes={"dp": 2, "tp": 2}, num_micro_batches=4, tolerance=1e-10)

A run is anything with statuses (exit statuses), output, metrics (dicts with loss and grad_norm, one a
training step) and results (each rank's final weights by name; may be empty).
"""

import math
from dataclasses import dataclass

# The kinds, in the order in which they are looked for.
ENDED = "the run didn't end well"
FIRST_LOSS = "wrong from the first loss: weights, data or forward"
FACTOR = "right first loss, first norm off by a factor: scale"
PART = ("right first loss, first norm off, not by a constant factor: "
        "a part of the gradient is missing or counted twice")
UPDATE = ("right first loss and norm, a later one off: "
          "clipping, optimizer, gradients of the step before, or replicas drifting apart")
WEIGHTS = "losses and norms right, weights at the end differ"


@dataclass
class Diagnosis:
    kind: str
    details: str

    def __str__(self):
        return f"{self.kind}\n{self.details}"


def diagnose(run, reference, axes, num_micro_batches, tolerance):
    """Returns None for the same run, else a Diagnosis.

    axes: {"dp": 2, "tp": 2, ...}, from the slowest to the fastest, sizes of 1 may be left out.
    tolerance: the relative error that rounding may cause in losses and norms. For weights it is ten times
    that: AdamW divides small gradients by their own size, and with them their rounding errors.
    """
    if any(status != 0 for status in run.statuses) or len(run.metrics) != len(reference.metrics):
        return Diagnosis(ENDED, f"exit statuses {run.statuses}, {len(run.metrics)} of "
                                f"{len(reference.metrics)} training steps; the end of the output:\n"
                                + run.output[-2000:])
    rows = list(zip(run.metrics, reference.metrics))
    losses, norms = ([(row[key], expected[key]) for row, expected in rows] for key in ("loss", "grad_norm"))
    loss, norm = first_difference(losses, tolerance), first_difference(norms, tolerance)
    sizes = {**axes, "number of micro-batches": num_micro_batches}

    if loss == 0:
        details = difference("loss", losses, loss) + nearby(losses[0], sizes)
        if norm != 0:
            details += "\nThe first norm is right: only the loss that is printed is wrong."
        return Diagnosis(FIRST_LOSS, details)
    if norm == 0:
        factors = [value / expected for value, expected in norms[:3]]
        named = name_factor(factors[0], sizes)
        details = difference("grad_norm", norms, norm)
        # A wrong scale hardly moves an AdamW run, so it shows as the same factor again in the next steps.
        same = max(abs(factor - factors[0]) for factor in factors) < 0.01 * abs(factors[0] - 1)
        if named or same and factors[0] > 0:
            where = " and ".join(named) if named else "nothing in this layout has that size"
            return Diagnosis(FACTOR, f"{details}\nThe factor is {describe(factors[0])}: {where}.")
        return Diagnosis(PART, f"{details}\nThe norm over the right one, step by step: "
                               + ", ".join(f"{factor:.6g}" for factor in factors))
    if loss is not None or norm is not None:
        found = [("loss", losses, loss), ("grad_norm", norms, norm)]
        return Diagnosis(UPDATE, "\n".join(difference(*it) for it in found if it[2] is not None))
    if not run.results:
        return None
    wrong = wrong_weights(run.results, reference.results[0], axes, 10 * tolerance)
    if wrong:
        more = f"\n... and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        return Diagnosis(WEIGHTS, "\n".join(wrong[:8]) + more)
    return None


def first_difference(pairs, tolerance):
    """The place of the first pair whose numbers differ by more than rounding, or None."""
    return next((i for i, (value, expected) in enumerate(pairs)
                 if not abs(value - expected) <= tolerance * abs(expected)), None)  # "not <=" also sees NaN


def difference(name, pairs, place):
    value, expected = pairs[place]
    return (f"{name} at training step {place + 1} is {value!r}, not {expected!r} "
            f"(relative error {abs(value / expected - 1):.1e})")


def describe(factor):
    return f"{factor:.6g}" if factor >= 1 else f"1 / {1 / factor:.6g}"


def candidates(sizes):
    """Yields (factor, name) of the factors that a mistake may have in this layout."""
    sizes = {name: size for name, size in sizes.items() if size > 1}
    for name, size in sizes.items():
        yield size, name
        yield math.sqrt(size), f"the square root of {name}"
        yield size**2, f"{name} squared"
    names = list(sizes)
    for i, first in enumerate(names):
        for second in names[i + 1:]:
            yield sizes[first] * sizes[second], f"{first} x {second}"


def name_factor(factor, sizes, tolerance=1e-5):
    """What in the layout has the size of this factor, or of one over it."""
    if not 0 < factor < math.inf:
        return []
    size = max(factor, 1 / factor)
    return [name for candidate, name in candidates(sizes) if abs(size / candidate - 1) < tolerance]


def nearby(pair, sizes):
    """A hint for a loss that is roughly a part or a multiple of the right one."""
    factor = pair[0] / pair[1]
    named = name_factor(factor, sizes, tolerance=0.05)
    return f"\nThat is about {describe(factor)} of it: {' and '.join(named)}." if named else ""


def wrong_weights(results, expected, axes, tolerance):
    """Compares each rank's weights with its part of the expected ones. Returns what is wrong, in words.

    Ranks count tp fastest, then cp, pp, dp. A weight that is smaller than expected in one dim is a shard: the
    tp_rank-th part along that dim. All weights have to be somewhere, for each dp and cp rank anew.
    """
    tp, cp, pp = (axes.get(name, 1) for name in ("tp", "cp", "pp"))
    wrong, held = [], {}
    for rank, weights in enumerate(results):
        tp_rank, cp_rank, dp_rank = rank % tp, rank // tp % cp, rank // (tp * cp * pp)
        found = held.setdefault((dp_rank, cp_rank), set())
        for name, weight in (weights or {}).items():
            whole = expected.get(name)
            if whole is None:
                wrong.append(f"rank {rank}: {name} is no weight of the single process")
                continue
            dim = shard_dim(weight.shape, whole.shape, tp)
            if dim is None:
                wrong.append(f"rank {rank}: {name} is {tuple(weight.shape)}, no part of {tuple(whole.shape)}")
                continue
            part = whole if dim == "whole" else whole.chunk(tp, dim)[tp_rank]
            found.update((name, t) for t in (range(tp) if dim == "whole" else [tp_rank]))
            error = ((weight - part).norm() / part.norm()).item()
            if not error <= tolerance:
                wrong.append(f"rank {rank}: {name} is off by {error:.1e}")
    for (dp_rank, cp_rank), found in held.items():
        missing = [name for name in expected if any((name, t) not in found for t in range(tp))]
        if missing:
            wrong.append(f"dp rank {dp_rank}, cp rank {cp_rank}: nobody has all of {', '.join(missing)}")
    return wrong


def shard_dim(shape, whole, tp):
    """The dim along which a weight is a part of the whole one; "whole" if it is no part, None if neither."""
    if tuple(shape) == tuple(whole):
        return "whole"
    for dim in range(len(whole)):
        if tuple(whole) == (*shape[:dim], shape[dim] * tp, *shape[dim + 1:]) and len(shape) == len(whole):
            return dim
    return None
