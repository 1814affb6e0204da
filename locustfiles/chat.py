"""locust -f locustfiles/chat.py: conversations over several turns."""

from tgi_load import listeners, users

__all__ = ["Chat", "listeners"]


class Chat(users.ChatUser):
    pass
