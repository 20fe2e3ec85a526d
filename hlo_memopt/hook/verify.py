"""What a rewritten module must pass before it leaves us."""

from __future__ import annotations

from hlo_memopt.hook.registry import logger, registry


def verify_rewrite(original: bytes, rewritten: object) -> None:
    """Raises if ``rewritten`` is not a module that XLA will read, or not one that computes what ``original`` does."""
    if not isinstance(rewritten, bytes) or not rewritten:
        raise ValueError(f"the plan gave {type(rewritten).__name__} in place of a module")

    from hlo_memopt.check import check_rewrite

    check_rewrite(original, rewritten)
    _read_back(rewritten)


def _read_back(rewritten: bytes) -> None:
    """XLA's own parser and its check of the schedule. jaxlib._hlo is private: without it we do with the checker."""
    try:
        from jaxlib._hlo import HloModule

        parse = HloModule.from_serialized_hlo_module_proto
        schedule_of = HloModule.schedule
    except (ImportError, AttributeError) as error:
        if registry.once("no jaxlib._hlo"):
            logger.debug("this jaxlib has no HloModule to read rewritten modules back with: %s", error)
        return
    schedule = schedule_of(parse(rewritten))
    if schedule is None:
        raise ValueError("the rewritten module has no schedule")
    schedule.verify()
