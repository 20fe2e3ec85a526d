"""What XLA calls with every module that it has scheduled.

Registered once per platform, for the life of the process; XLA calls it for every compile, from whatever thread. It
answers None ("no change") for all modules that are not ours, and for ours whenever anything of ours fails.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

from hlo_memopt.errors import DonationLostError, MemoryLimitError, PlanError
from hlo_memopt.hook import scope
from hlo_memopt.hook.registry import Compile, logger, module_name, registry
from hlo_memopt.hook.verify import verify_rewrite

_registered: set[str] = set()
_donation_lost: set[str] = set()  # platforms whose XLA was seen to forget donation
_lock = threading.Lock()


def register(platform: str, platform_version: str = "") -> None:
    """Have XLA call us for ``platform``, the name of a backend that is up. Raises if XLA cannot.

    JAX says "gpu" where the plugin that takes the hook is called "cuda" or "rocm": jax 0.10 wants the former, later
    ones the latter.
    """
    with _lock:
        if platform in _registered:
            return
        import jax.extend.xla as jex

        kind = "rocm" if "rocm" in platform_version.lower() else "cuda"
        names = [platform, kind] if platform == "gpu" else [platform]
        for name in names:
            try:
                jex.register_hlo_module_transformation(
                    functools.partial(transform, platform=kind if platform == "gpu" else platform),
                    name="hlo_memopt",
                    stage=jex.PipelineStage.POST_SCHEDULER,
                    platforms=[name],
                )
            except Exception:
                if name == names[-1]:
                    raise
            else:
                _registered.add(platform)
                return


def transform(data: bytes, platform: str) -> bytes | None:
    """Serialized HloModuleProto in, the rewritten one or None out.

    With ``strict`` (and for a memory limit that cannot be met) it raises, which fails the compile; the seam then
    raises what is in ``Compile.error``.
    """
    compile_ = _find(data)
    if compile_ is None:
        return None
    started = time.perf_counter()
    try:
        return _rewrite(data, platform, compile_)
    except Exception as error:
        compile_.error = error
        if compile_.options.strict or isinstance(error, MemoryLimitError):
            compile_.raised = True
            raise
        if not isinstance(error, DonationLostError) or registry.once("donation lost"):
            warn(compile_.name, error)
        return None
    except BaseException as error:  # Ctrl-C: XLA turns it into an error of its own, the seam turns it back
        compile_.error, compile_.raised = error, True
        raise
    finally:
        compile_.seconds = time.perf_counter() - started


def _find(data: bytes) -> Compile | None:
    """The compile that a module belongs to; None: not ours."""
    from hlo_memopt.hook import seam

    if seam.installed():
        return registry.claim(data)
    name = module_name(data)
    options = scope.options_for(name)
    return None if options is None else Compile(name, options)


def _rewrite(data: bytes, platform: str, compile_: Compile) -> bytes | None:
    from hlo_memopt.hlo.proto import parse_module
    from hlo_memopt.planner import plan as planner

    compile_.platform = platform
    aliases = parse_module(data).input_output_alias
    compile_.aliased = bool(aliases.entries)
    carried = compile_.aliased and loses_donation(platform)
    given = _carried(data, platform, compile_) if carried else data
    plan = planner.plan_module(given, platform, compile_.options)
    if carried:
        from hlo_memopt.hook import donation

        plan = donation.against(plan, data)
    if plan.changed:
        rewritten = plan.apply(given)
        verify_rewrite(given, rewritten)
    compile_.plan = plan
    registry.remember(plan)
    if not plan.changed:
        return None
    compile_.rewritten = compile_.kept = True
    compile_.carried = aliases if carried else None
    return rewritten


def _carried(data: bytes, platform: str, compile_: Compile) -> bytes:
    """The module in the form that keeps donation where XLA forgets it; only for a seam that is sure to get it back."""
    from hlo_memopt.hook import donation

    if platform != "cpu" or not (_is_0_10() and compile_.reloadable and compile_.marked):
        raise donation_lost(platform)
    try:
        return donation.prepared(data, compile_.options.elide_copies)
    except ValueError as error:
        raise donation_lost(platform, error) from error


def loses_donation(platform: str) -> bool:
    """Whether XLA drops the aliasing of donated arguments and outputs from a module that a hook returns.

    jaxlib 0.10.2 replaces the entry computation and thereby resets it; 0.12 does not. Others are found out by the seam.
    On CPU there is a way around it, see ``donation``.
    """
    return platform in _donation_lost or _is_0_10()


def _is_0_10() -> bool:
    import jaxlib

    return jaxlib.__version__.startswith("0.10.")


def donation_lost(platform: str, cause: Exception | None = None) -> DonationLostError:
    import jaxlib

    _donation_lost.add(platform)
    return DonationLostError(
        f"its arguments are donated, and XLA in jaxlib {jaxlib.__version__} on {platform} forgets that in a rewritten "
        f"module; upgrade jaxlib, or do not donate" + (f" (it cannot be kept: {cause})" if cause else "")
    )


def warn(name: str, error: Any) -> None:
    """The one warning about a failure of ours."""
    reason = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
    logger.warning("module %s is compiled as XLA scheduled it: %s", name, reason)


def as_plan_error(name: str, error: BaseException) -> BaseException:
    """What ``strict`` raises for ``error``."""
    if isinstance(error, (MemoryLimitError, PlanError)) or not isinstance(error, Exception):
        return error
    wrapped = PlanError(f"module {name} could not be planned: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
