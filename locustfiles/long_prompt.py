"""locust -f locustfiles/long_prompt.py: long documents, short answers."""

from tgi_load import listeners, users

__all__ = ["LongPrompt", "listeners"]


class LongPrompt(users.LongPromptUser):
    pass
