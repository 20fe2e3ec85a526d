"""From a module to a plan: liveness, order, offsets, prediction. One public function, `plan_module`."""

from hlo_memopt.planner.plan import Plan, plan_module

__all__ = ["Plan", "plan_module"]
