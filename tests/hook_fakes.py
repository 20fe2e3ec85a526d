"""A planner and a checker for tests of the hook: quick, and wrong on demand."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import hlo_memopt.check
import hlo_memopt.planner.plan as planner
from hlo_memopt.hlo import proto
from hlo_memopt.hlo.graph import Module
from hlo_memopt.options import Options


def another_order(data: bytes) -> bytes:
    """The module with the entry computation in the topological order that takes the last ready instruction first."""
    module = Module.from_bytes(data)
    entry = module.entry
    waits = {i.id: {*i.operands, *i.control_predecessors} for i in entry.instructions}
    order: list[int] = []
    while waits:
        ready = [i for i, before in waits.items() if before <= set(order)]
        order.append(ready[-1])
        del waits[ready[-1]]
    return with_order(data, order)


def backwards(data: bytes) -> bytes:
    """The module with a schedule that is not topological."""
    module = Module.from_bytes(data)
    return with_order(data, module.schedule[module.entry.id][::-1])


def wrong_ids(data: bytes) -> bytes:
    module = Module.from_bytes(data)
    return with_order(data, [*module.schedule[module.entry.id][:-1], 2**40 + 7])


def garbage(data: bytes) -> bytes:
    return b"no module at all" * 4


def with_order(data: bytes, order: list[int]) -> bytes:
    message = proto.parse_module(data)
    for sequence in message.schedule.sequences:
        if sequence.key == message.entry_computation_id:
            del sequence.value.instruction_ids[:]
            sequence.value.instruction_ids.extend(order)
    return proto.serialize(message)


def entry_order(executable) -> list[str]:
    """Names of the entry computation's instructions as the executable has them."""
    module = Module.from_bytes(executable.hlo_modules()[0].as_serialized_hlo_module_proto())
    return [module.entry.by_id[i].name for i in module.schedule[module.entry.id]]


@dataclasses.dataclass(frozen=True)
class FakePlan:
    module: str
    platform: str
    options: Options
    changed: bool
    rewrite: Callable[[bytes], bytes]
    peak_before: int = 200
    peak_after: int = 100

    def apply(self, data: bytes) -> bytes:
        return self.rewrite(data)


@dataclasses.dataclass
class Planner:
    """What was planned, and how it is rewritten; ``fail`` is raised instead."""

    rewrite: Callable[[bytes], bytes] = another_order
    fail: BaseException | None = None
    changed: bool = True
    calls: list[FakePlan] = dataclasses.field(default_factory=list)

    def __call__(self, data: bytes, platform: str = "cpu", options: Options | None = None) -> FakePlan:
        name = proto.parse_module(data).name
        plan = FakePlan(name, platform, options or Options(), self.changed, self.rewrite)
        self.calls.append(plan)
        if self.fail is not None:
            raise self.fail
        return plan

    def names(self) -> list[str]:
        return [c.module for c in self.calls]


@contextlib.contextmanager
def installed(check: Callable[[bytes, bytes], None] | None = None) -> Iterator[Planner]:
    """The fake planner in place of the real one; ``check`` in place of the checker (default: passes everything)."""
    fake = Planner()
    real, real_check = planner.plan_module, hlo_memopt.check.__dict__.get("check_rewrite")
    planner.plan_module = fake
    hlo_memopt.check.check_rewrite = check or (lambda original, rewritten: None)
    try:
        yield fake
    finally:
        planner.plan_module = real
        if real_check is None:
            del hlo_memopt.check.check_rewrite
        else:
            hlo_memopt.check.check_rewrite = real_check
