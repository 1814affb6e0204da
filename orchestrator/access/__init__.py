"""Who may use a gateway, how much, and how soon it is served."""

from orchestrator.access.check import check_access
from orchestrator.access.exposure import check_exposure
from orchestrator.access.gate import Access, Visit
from orchestrator.access.routes import NotFound

__all__ = ["Access", "NotFound", "Visit", "check_access", "check_exposure"]
