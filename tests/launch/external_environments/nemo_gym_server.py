"""A resources server of NeMo Gym that counts in each session; it prints its URL."""

import socket

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from resources_servers.example_session_state_mgmt import app

listening = socket.create_server(("127.0.0.1", 0))
port = listening.getsockname()[1]
where = {"host": "127.0.0.1", "port": port}
config = app.StatefulCounterResourcesServerConfig(name="resources", entrypoint="app.py", **where)
head = BaseServerConfig(host="127.0.0.1", port=1)  # which nobody asks
client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
server = app.StatefulCounterResourcesServer(config=config, server_client=client)
print(f"http://127.0.0.1:{port}", flush=True)  # noqa: T201 - whoever starts it reads this
uvicorn.Server(uvicorn.Config(server.setup_webserver(), log_level="warning")).run([listening])
