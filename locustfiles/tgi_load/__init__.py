"""Users, shapes and measurements for servers that speak TGI's API.  Imports nothing of the orchestrator."""
