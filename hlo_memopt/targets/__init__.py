"""Devices that are not there, to compile for."""

from hlo_memopt.targets.topology import Target, available, compile_only, prepare

__all__ = ["Target", "available", "compile_only", "prepare"]
