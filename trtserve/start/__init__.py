"""The life of a server: checked before it is launched, explained when it does not come up, stopped without a trace."""

from trtserve.servers import Server, condition, find_server, list_servers, recorded_servers
from trtserve.start.checks import rehearse, transaction_policy
from trtserve.start.ending import stop_server
from trtserve.start.life import require_startable, serve_foreground, start_server
from trtserve.start.logs import find_log, follow_log
from trtserve.start.plan import InstancePlan, Plan, plan_server, with_free_ports
from trtserve.start.repositories import find_repository
from trtserve.start.world import wants_rebuild

__all__ = [
    "InstancePlan",
    "Plan",
    "Server",
    "condition",
    "find_log",
    "find_repository",
    "find_server",
    "follow_log",
    "list_servers",
    "plan_server",
    "recorded_servers",
    "rehearse",
    "require_startable",
    "serve_foreground",
    "start_server",
    "stop_server",
    "transaction_policy",
    "wants_rebuild",
    "with_free_ports",
]
