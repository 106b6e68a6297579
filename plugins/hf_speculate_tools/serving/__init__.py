"""transformers' own server, for one loaded model with its speculator.

transformers brings the endpoints, their formats and the order of requests (`stock`). This package gives it a loaded
model, measures every request, ends it when its client hangs up, and adds the drafts to `usage` (`gateway`, `requests`).
FastAPI and uvicorn come with the extra `serve`; only `run_server` imports them.
"""

from .server import check_extra as check_extra
from .server import open_socket as open_socket
from .server import run_server as run_server
