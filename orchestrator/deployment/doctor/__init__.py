"""Does this machine carry a deployment: settings, engine, GPUs, memory, ports, ways between containers.

Each check gathers facts and hands them to a pure function that returns a `Finding`.  `run` is the order.
"""
