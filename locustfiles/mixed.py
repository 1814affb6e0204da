"""locust -f locustfiles/mixed.py: all kinds of users, by --weights."""

from tgi_load import listeners, users

__all__ = ["Chat", "Code", "LongPrompt", "listeners"]


class Chat(users.ChatUser):
    pass


class Code(users.CodeUser):
    pass


class LongPrompt(users.LongPromptUser):
    pass
