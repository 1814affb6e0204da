"""locust -f locustfiles/code_completion.py: short completions of code."""

from tgi_load import listeners, users

__all__ = ["Code", "listeners"]


class Code(users.CodeUser):
    pass
