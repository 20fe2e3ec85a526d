"""What may run next in the search of `exact`, and what need not be tried: risers and descents.

    live(M)     = sum of size(b) over b with producer in M (or -1) and (b live out, or a user of b not in M)
    usage(v, M) = live(M) + bytes of v's outputs + transient(v) - reuse(v, M)          v ready after the set M

`live` is a function of the set of nodes that have run, and submodular: what a node adds to it can only shrink as
other nodes run. The users of a buffer are its producer and its consumers. Two rules keep the number of sets small;
neither loses optimality.

**Risers** run as late as possible. R is a set of nodes r without transient, where for each buffer b that r uses
(a) b is live out or a node that must come after r uses b, or (b) some user of b is not in R. r *sleeps* after M
while each of its buffers of kind (b) has a user outside of R that has not run; if it has one only, that one must
not be able to take over b in place. A sleeping riser frees nothing. (Where there are `first_only` bytes, R holds
only nodes with predecessors.)

  * Swap: let r sleep after P and be followed by x, no successor of r. Then x, r is no worse than r, x.
    x sees no more: live(P) <= live(P + r), and an operand that x takes over after P + r has no other user left, so
    it is none of r's (not of kind (a), and for kind (b) x would be the only user left and r awake).
    r sees no more than x did: with live(P + r) = live(P) + out(r), and operands taken over being freed,
        usage(r, P + x) <= live(P) + out(x) - freed(x) + out(r) <= live(P + r) + out(x) - reuse(x) <= usage(x, P + r).
  * So after M a *move* will do as the next step: a node w that is no sleeping riser, behind those of its
    ancestors that have not run, which must all be sleeping risers. (In any completion let w be the first node that
    is no sleeping riser. All before it sleep, from M on; by swaps those that w does not need go behind w.)
    The usage of a move is that of w, whose outputs are at least its reuse. Without such a w only risers of kind (a)
    are left; what these use is live out, and the bytes live out are part of `static_bound`.

**Descents** run at once. Let Q be moves w1 .. wk that each became possible by the one before (a chain, often one
move), with no usage above the length so far, live(M + Q) <= live(M) and live > live(M) on the way. Then no
alternative to Q need be tried. (Take any completion and move Q to its front; let S be other nodes and Q' the part of
Q that had run with S. Q' is w1 .. wi and perhaps risers that sleep after these, so live(M + Q') >= live(M + Q), and
as Q - Q' adds no more behind S, live(M + S + Q) <= live(M + S + Q'): no other node sees more bytes, and a buffer it
shares with Q can only die there instead.)

All quantities are bytes, exact Python ints; sets are Python ints, one bit a node.
"""

from __future__ import annotations

from collections.abc import Iterator

from hlo_memopt.schedule.problem import Problem

_CHAIN_TRIES = 48  # nodes looked at while one descent is sought


def reuse_pairs(problem: Problem) -> list[list[tuple[int, int]]]:
    """For each node its (operand, output) pairs, in list order: those that can ever be taken, each once."""
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(problem.n)]
    for v, b, c in problem.reuse:
        buf = problem.buffers[b]
        if not buf.live_out and (v in buf.consumers or v == buf.producer) and (b, c) not in pairs[v]:
            pairs[v].append((b, c))
    return pairs


def ancestor_masks(n: int, preds: tuple[tuple[int, ...], ...]) -> list[int]:
    """anc[v]: bit u is set if u runs before v in every order (v itself is not in it). ValueError on a cycle."""
    waiting = [len(set(p)) for p in preds]
    succs: list[list[int]] = [[] for _ in range(n)]
    for v in range(n):
        for p in set(preds[v]):
            succs[p].append(v)
    anc = [0] * n
    stack = [v for v in range(n) if not waiting[v]]
    done = 0
    while stack:
        v = stack.pop()
        done += 1
        for w in succs[v]:
            anc[w] |= anc[v] | 1 << v
            waiting[w] -= 1
            if not waiting[w]:
                stack.append(w)
    if done != n:
        raise ValueError("the predecessor relation has a cycle")
    return anc


def members(mask: int) -> Iterator[int]:
    """The nodes of a set, in rising order."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit


class _Risers:
    """The set R of the module docstring, as ``mask``; ``waking[r]``: sets of nodes, r wakes once one has run."""

    def __init__(self, problem: Problem, anc: list[int], users: list[int], first_only: int) -> None:
        """``users``: the users of each buffer."""
        n = problem.n
        self._anc, self._users = anc, users
        self._in_place = [0] * len(users)  # users of a buffer that may take it over
        for v, pairs in enumerate(reuse_pairs(problem)):
            for i, _ in pairs:
                self._in_place[i] |= 1 << v
        out = [0] * n
        uses: list[list[int]] = [[] for _ in range(n)]  # buffers that could die at v
        for i, b in enumerate(problem.buffers):
            if b.producer >= 0:
                out[b.producer] += b.size
            if b.size and not b.live_out:
                for v in members(users[i]):
                    uses[v].append(i)
        desc = ancestor_masks(n, problem.succs)
        kind_b = {
            v: [i for i in uses[v] if not users[i] & desc[v]]
            for v in range(n)
            if not problem.transient[v] and (anc[v] or not first_only)
        }
        self.mask = 0
        sleepers: dict[int, list[int]] = {}  # buffer -> risers for which it is of kind (b)
        # which of those that share a buffer may sleep: large outputs before small ones, those needed later first
        for v in sorted(kind_b, key=lambda v: (bool(kind_b[v]), -out[v], desc[v].bit_count(), v)):
            new = {i: sleepers.get(i, []) + [v] * (i in kind_b[v]) for i in uses[v]}
            mask = self.mask | 1 << v
            if all(self._holds(i, r, mask) for i, risers in new.items() for r in risers):
                self.mask = mask
                sleepers |= new
        self.waking: list[list[int]] = [[] for _ in range(n)]
        for i, risers in sleepers.items():
            others = users[i] & ~self.mask
            takers = [1 << u for u in members(others & self._in_place[i])]
            for r in risers:
                self.waking[r] += [others ^ taker for taker in takers] or [others]

    def _holds(self, buffer: int, riser: int, risers: int) -> bool:
        """Whether ``buffer`` keeps ``riser`` asleep when just the riser's ancestors have run."""
        others = self._users[buffer] & ~risers & ~self._anc[riser]
        return bool(others & ~self._in_place[buffer] or others & (others - 1))


class Steps:
    """The problem compiled for `run`: what one move does to a state (M, ready nodes, live bytes).

    Attributes:
      roots, live_in: the ready nodes and live bytes at the start.
      whole[v]: the nodes of v's move, those that may have run included.
      wakeable, first[v]: risers that can wake, and those that v needs: if ready (awake), they move before v.

    "Ready" is a node that is no sleeping riser if all but risers among its ancestors have run.
    """

    def __init__(self, problem: Problem) -> None:
        n, buffers = problem.n, problem.buffers
        self.n = n
        self._out = [0] * n  # bytes of v's outputs
        frees: list[dict[int, int]] = [{} for _ in range(n)]  # v -> {other users of b: bytes freed once all have run}
        self.live_in = 0
        self._first_only = 0  # live in and never read: in memory at the first step only
        masks: list[int] = []
        for b in buffers:
            users = set(b.consumers) | ({b.producer} if b.producer >= 0 else set())
            mask = sum(1 << u for u in users)
            masks.append(mask)
            if b.producer >= 0:
                self._out[b.producer] += b.size
            elif users or b.live_out:
                self.live_in += b.size
            else:
                self._first_only += b.size
            if not b.live_out and b.size:
                for u in users:
                    others = mask ^ 1 << u
                    frees[u][others] = frees[u].get(others, 0) + b.size
        anc = ancestor_masks(n, problem.preds)
        risers = _Risers(problem, anc, masks, self._first_only)
        self._rank = [(anc[v].bit_count(), v) for v in range(n)]  # a topological order
        self._rise: dict[int, int] = {}
        lift = [a & risers.mask for a in anc]
        self.whole = [lift[v] | 1 << v for v in range(n)]
        self.wakeable = sum(1 << v for v in range(n) if risers.waking[v])
        self.first = [lift[v] & self.wakeable for v in range(n)]
        # of each node: risers that it needs, bytes that it adds while it runs, bytes that it adds for good,
        # (other users, bytes that it frees once they have run), (other users, operand, output, bytes) of its reuse
        self._moves = [
            (
                lift[v],
                self._out[v] + problem.transient[v],
                self._out[v] - frees[v].pop(0, 0),
                tuple(sorted(frees[v].items())),
                tuple((masks[b] ^ 1 << v, b, c, buffers[c].size) for b, c in pairs),
            )
            for v, pairs in enumerate(reuse_pairs(problem))
        ]
        self._link(problem, anc, risers)

    def _link(self, problem: Problem, anc: list[int], risers: _Risers) -> None:
        """Sets ``roots`` and ``succs``: what each node can make ready (not if it has run), what must have run, both."""
        self.roots = 0
        succs: list[list[tuple[int, int, int]]] = [[] for _ in range(self.n)]
        before = [0] * self.n  # the nearest ancestors that are no risers
        for _, v in sorted(self._rank):
            for p in problem.preds[v]:
                before[v] |= before[p] if risers.mask >> p & 1 else 1 << p
            needs = [before[v] | some for some in risers.waking[v]] if risers.mask >> v & 1 else [before[v]]
            for need in needs:
                covered = 0
                for u in members(need):
                    covered |= anc[u]
                need &= ~covered
                if not need:
                    self.roots |= 1 << v
                for u in members(need):
                    succs[u].append((1 << v, need, need | 1 << v))
        self.succs = [tuple(sorted(set(s))) for s in succs]

    def run(self, v: int, mask: int, live: int) -> tuple[int, int]:
        """(usage of v's move after ``mask``, live bytes after it)."""
        lift, need, gain, frees, reuse = self._moves[v]
        if lift:
            risers = lift & ~mask
            rise = self._rise.get(risers)
            if rise is None:
                rise = self._rise[risers] = sum(self._out[r] for r in members(risers))
            mask |= risers
            live += rise
        usage = live + need
        if not mask:
            usage += self._first_only
        after = live + gain
        for others, size in frees:
            if not others & ~mask:
                after -= size
        if reuse:
            taken: list[int] = []  # operands b, and ~c for outputs c
            for others, b, c, size in reuse:
                if not others & ~mask and b not in taken and ~c not in taken:
                    taken += b, ~c
                    usage -= size
        return usage, after

    def ready(self, v: int, mask: int) -> int:
        """The nodes that become ready when v has moved, ``mask`` including v."""
        new = 0
        for bit, need, either in self.succs[v]:
            if not (mask ^ need) & either:
                new |= bit
        return new

    def expand(self, moves: list[int]) -> list[int]:
        """The order of all nodes in which ``moves`` run; sleeping risers that no move needs come last."""
        order: list[int] = []
        done = 0
        for v in moves:
            order += [r for _, r in sorted(self._rank[r] for r in members(self.whole[v] & ~done))]
            done |= self.whole[v]
        return order + [r for _, r in sorted(self._rank[r] for r in members((1 << self.n) - 1 & ~done))]

    def descend(self, mask: int, ready: int, live: int, length: int, path: list[int]) -> tuple[int, int, int]:
        """Runs every chain that the descent rule allows (module docstring); appends it to ``path``."""
        again = True
        wakeable = self.wakeable
        while again:
            again = False
            rest = ready
            while rest:
                bit = rest & -rest
                rest ^= bit
                v = bit.bit_length() - 1
                if wakeable and self.first[v] & ready:
                    continue
                usage, after = self.run(v, mask, live)
                if usage > length:
                    continue
                if after <= live:
                    path.append(v)
                    mask |= self.whole[v]
                    new = self.ready(v, mask)
                    ready = ready ^ bit | new
                    rest |= new
                    again |= bool(rest != ready)  # what was passed over may have become free
                    live = after
                    continue
                chain = self._chain(v, mask, ready, after, live, length)
                if chain:
                    for v, after in chain:
                        path.append(v)
                        mask |= self.whole[v]
                        ready = ready & ~(1 << v) | self.ready(v, mask)
                        live = after
                    again = True
                    break
        return mask, ready, live

    def _chain(self, v: int, mask: int, ready: int, after: int, goal: int, length: int) -> list[tuple[int, int]]:
        """A chain from v down to at most ``goal`` live bytes as [(node, live bytes after it)], [] if none is seen."""
        chain = [(v, after)]
        mask |= self.whole[v]
        new = self.ready(v, mask) & ~ready
        stack: list[tuple[int, int, int]] = [(mask, ready | new, new)]
        tries = _CHAIN_TRIES
        while stack and tries:
            mask, ready, new = stack[-1]  # ready: with nodes of the chain, which are in mask
            if not new:
                stack.pop()
                chain.pop()
                continue
            bit = new & -new
            stack[-1] = (mask, ready, new ^ bit)
            tries -= 1
            w = bit.bit_length() - 1
            if self.wakeable and self.first[w] & ready & ~mask:
                continue
            usage, low = self.run(w, mask, chain[-1][1])
            if usage > length:
                continue
            chain.append((w, low))
            if low <= goal:
                return chain
            mask |= self.whole[w]
            new = self.ready(w, mask) & ~ready
            stack.append((mask, ready | new, new))
        return []

    def dive(self, length: int) -> tuple[list[int], int]:
        """Greedy moves to the end and their peak: descents, else the move of least (length, live bytes after it)."""
        path: list[int] = []
        mask, ready, live = self.descend(0, self.roots, self.live_in, length, path)
        while ready:
            best = (0, 0, -1)
            for v in members(ready):
                if self.first[v] & ready:
                    continue
                usage, after = self.run(v, mask, live)
                key = (max(usage, length), after, v)
                if best[2] < 0 or key < best:
                    best = key
            length, live, v = best
            path.append(v)
            mask |= self.whole[v]
            ready = ready ^ 1 << v | self.ready(v, mask)
            mask, ready, live = self.descend(mask, ready, live, length, path)
        return path, length
