"""Prices of idle places: the dual of "which temporaries lie in them", chosen so that the minimum cut is largest.

What lies in idle places at one moment is a matching of live temporaries b to places i; it saves the sizes of what is
matched. Companions never lie in a circle: q(j) in place i starts after place i was read, and so after q(i) has
started. So of a class C of companions at most (how many are alive) - 1 lie in each other's places. By duality no
state saves more than

    sum of u(i) over idle places + sum of w(b) over live temporaries + sum over C of y(C) * (live companions in C - 1)

for all u, w, y >= 0 with  u(i) + w(b) + [b and i's companion in C] y(C) >= size(b)  wherever b may lie in i, if some
companion in each C is alive for certain. Then

    temp >= min cut of  size(b) - w(b) - u(i) [b companion of i] - y(C) [b in C]
            - sum of u(i) over places without companion + sum of y(C) + bytes of the node itself .

The cut minimizes over states, `improve` maximizes over prices, by cutting planes (Kelley, "The cutting-plane method for
solving convex programs", 1960): each state found is a row of a linear program in (u, w, y). Any prices give a true
bound, so rounding does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hlo_memopt.planner.idle import Fits, Place
from hlo_memopt.schedule.flat import Flat

_PAIRS = 6_000  # rows of the linear program, at most
_SMALL = 1e-5  # temporaries below this share of what is alive are left out of the program
_CLOSE = 5e-4  # gap to the program's optimum that is close enough


@dataclass(frozen=True)
class Prices:
    """``u`` by idle place and ``y`` by class, in bytes."""

    u: np.ndarray
    y: np.ndarray


Cut = Callable[[np.ndarray, Prices], tuple[int, np.ndarray]]


class NodePrices:
    """Prices at one node: which places may be idle there, which temporaries alive.

    Args:
      flat: the problem; ``fits``: its places.
      idle: bits of the places that may be idle while the node runs.
      certain: mask of the buffers that are alive in every state from which the node can run.
    """

    def __init__(self, flat: Flat, fits: Fits, idle: int, certain: np.ndarray) -> None:
        self._flat, self._fits = flat, fits
        self.idle = idle
        self.places = [i for i in range(len(fits.places)) if idle >> i & 1]
        self.companion = np.array([fits.places[i].companion for i in self.places], dtype=np.int64)
        self.classes = _classes(fits.places, self.places, flat, certain)
        # class by companion buffer and by place; -1: none
        self._class_of_place = {i: c for c, members in enumerate(self.classes) for i in members}
        self._class_of_buffer = {fits.places[i].companion: c for i, c in self._class_of_place.items()}

    def reduced(self, prices: Prices) -> tuple[np.ndarray, np.ndarray, int]:
        """Under some prices: sizes left to be cut; by place, what its companion cannot pay; what classes give back.

        The bound is the cut, less all that is unpaid, plus what is given back.
        """
        size = self._flat.size.copy()
        cheapest = _Cheapest({i: int(u) for i, u in zip(self.places, prices.u, strict=True)})
        members = [sum(1 << i for i in c) for c in self.classes]
        for j, fits in enumerate(self._fits.of_buffer):
            here = fits & self.idle
            if not here:
                continue
            whole = int(size[j])
            c = self._class_of_buffer.get(j, -1)
            among = members[c] & here if c >= 0 else 0
            w = whole - cheapest.of(here & ~among)
            if among:
                w = max(w, whole - cheapest.of(among) - int(prices.y[c]))
            size[j] -= max(0, w)
        unpaid = prices.u.copy()
        for k, q in enumerate(self.companion.tolist()):
            if q >= 0:
                paid = min(int(unpaid[k]), int(size[q]))
                size[q] -= paid
                unpaid[k] -= paid
        back = int(prices.y.sum())
        for c, places in enumerate(self.classes):
            y = int(prices.y[c])
            for i in places:
                q = self._fits.places[i].companion
                paid = min(y, int(size[q]))
                size[q] -= paid
                back -= y - paid
        return size, unpaid, back

    def improve(self, cut: Cut, alive: np.ndarray, rounds: int) -> int:
        """The best bound found in a number of rounds, in bytes.

        Args:
          cut: from sizes and prices to (least bytes, mask of the buffers alive then).
          alive: mask of the buffers alive in a first state.
        """
        states = [alive]
        best, best_prices = 0, None
        for n in range(rounds):
            found = self._solve(states)
            if found is None:
                break
            prices, most = found
            if best_prices is not None and n % 2:  # half way back: cutting planes oscillate
                prices = Prices((prices.u + best_prices.u) // 2, (prices.y + best_prices.y) // 2)
            size, unpaid, back = self.reduced(prices)
            value, state = cut(size, prices)
            value += back - int(unpaid.sum())
            if value > best:
                best, best_prices = value, prices
            if most - best <= _CLOSE * most:
                break
            states.append(state)
        return best

    def _solve(self, states: list[np.ndarray]) -> tuple[Prices, float] | None:
        """Prices that are best against the states known so far, and the bound that they would give."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        size = self._flat.size
        seen = np.any(states, axis=0)
        scale = float(max(1, max(int(size[s].sum()) for s in states)))
        wanted = np.flatnonzero(seen & (size > _SMALL * scale))
        wanted = wanted[np.argsort(-size[wanted], kind="stable")]
        place_at = {i: k for k, i in enumerate(self.places)}
        buffers: list[int] = []
        pairs: list[tuple[int, int, int]] = []  # (number of the buffer, of the place, class or -1)
        for j in wanted.tolist():
            bits = self._fits.of_buffer[j] & self.idle
            if not bits:
                continue
            c = self._class_of_buffer.get(j, -1)
            here = [i for i in self.places if bits >> i & 1]
            if len(pairs) + len(here) > _PAIRS:
                break
            for i in here:
                same = c >= 0 and self._class_of_place.get(i) == c
                pairs.append((len(buffers), place_at[i], c if same else -1))
            buffers.append(j)
        if not pairs:
            return None
        # columns: the bound t, u by place, w by buffer, y by class;  maximize t
        places, count, classes = len(self.places), len(buffers), len(self.classes)
        width = 1 + places + count + classes
        pair = np.array(pairs, dtype=np.int64)
        row = np.arange(len(pairs))
        rows, cols = [row, row], [1 + pair[:, 1], 1 + places + pair[:, 0]]
        inside = np.flatnonzero(pair[:, 2] >= 0)
        rows.append(inside)
        cols.append(1 + places + count + pair[inside, 2])
        vals = [-np.ones(2 * len(pairs) + len(inside))]
        right = [-size[np.array(buffers)[pair[:, 0]]] / scale]
        members = [np.array([self._fits.places[i].companion for i in c]) for c in self.classes]
        for n, alive in enumerate(states):
            # t + sum of u, w, y charged in this state <= bytes alive in it
            charge = np.zeros(width)
            charge[0] = 1.0
            charge[1 : 1 + places] = np.where(self.companion < 0, 1.0, alive[self.companion])
            charge[1 + places : 1 + places + count] = alive[buffers]
            charge[1 + places + count :] = [float(alive[m].sum()) - 1.0 for m in members]
            used = np.flatnonzero(charge)
            rows.append(np.full(len(used), len(pairs) + n))
            cols.append(used)
            vals.append(charge[used])
            right.append(np.array([size[alive].sum() / scale]))
        entries = np.concatenate(vals), (np.concatenate(rows), np.concatenate(cols))
        matrix = csr_array(entries, shape=(len(pairs) + len(states), width))
        goal = np.full(width, 1e-6)  # of equally good prices the low ones
        goal[0] = -1.0
        most = [(0.0, self._fits.places[i].bytes / scale) for i in self.places]
        bounds = [(0.0, None), *most, *[(0.0, None)] * (count + classes)]
        result = linprog(goal, matrix, np.concatenate(right), bounds=bounds, method="highs")
        if result.x is None:
            return None
        x = np.maximum(0, np.rint(result.x * scale)).astype(np.int64)
        return Prices(x[1 : 1 + places], x[1 + places + count :]), float(result.x[0]) * scale


class _Cheapest:
    """The lowest price among a set of places (bits); more than any size for the empty set."""

    def __init__(self, price: dict[int, int]) -> None:
        self._sorted = sorted((u, 1 << i) for i, u in price.items())
        self._known: dict[int, int] = {0: 2**62}

    def of(self, places: int) -> int:
        found = self._known.get(places)
        if found is None:
            found = self._known[places] = next(u for u, bit in self._sorted if bit & places)
        return found


def _classes(places: list[Place], idle: list[int], flat: Flat, certain: np.ndarray) -> list[list[int]]:
    """Groups of places whose companions fill them exactly, so that they might lie in each other's.

    At least one companion of each is alive for certain; none is made by a reader of another's place.
    """
    groups: dict[int, list[int]] = {}
    for i in idle:
        place = places[i]
        q = place.companion
        if q < 0 or place.overwritten or flat.size[q] != place.bytes:
            continue
        group = groups.setdefault(place.bytes, [])
        maker = int(flat.producer[q])
        if all(
            maker not in places[k].readers and int(flat.producer[places[k].companion]) not in place.readers
            for k in group
        ):
            group.append(i)
    return [
        group for group in groups.values() if len(group) > 1 and any(certain[places[i].companion] for i in group)
    ]
