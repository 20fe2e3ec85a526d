"""Plans put into the proto."""

from hlo_memopt.rewrite.copies import remove_copies
from hlo_memopt.rewrite.schedule import add_control_dependencies, put_schedule

__all__ = ["add_control_dependencies", "put_schedule", "remove_copies"]
