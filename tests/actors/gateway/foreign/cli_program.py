"""Starts a coding agent of a company as a user would, with its defaults, and pays what it prints."""

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

task = {**json.loads(Path(os.environ["SLUICE_TASK"]).read_text()), **json.load(sys.stdin)}
agent, name = sys.argv[1:]
home = Path.home()
COMMANDS = {
    "codex": ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
              "-c", "model_provider=sluice", "-m", "policy"],
    "gemini": ["--yolo", "-p"],
    "claude": ["--dangerously-skip-permissions", "-p"],
    "qwen": ["--yolo", "--auth-type", "openai", "-m", "policy", "-p"],
    "opencode": ["run", "--auto", "-m", "sluice/policy"],
}  # fmt: skip
(home / ".gemini").mkdir()
(home / ".gemini/settings.json").write_text('{"security": {"auth": {"selectedType": "gemini-api-key"}}}')
(home / ".codex").mkdir()
provider = {"name": "sluice", "base_url": os.environ["OPENAI_BASE_URL"], "env_key": "OPENAI_API_KEY"}
written = "\n".join(f"{key} = {json.dumps(value)}" for key, value in provider.items())
(home / ".codex/config.toml").write_text(f"[model_providers.sluice]\n{written}\n")
options = {"baseURL": os.environ["OPENAI_BASE_URL"], "apiKey": os.environ["OPENAI_API_KEY"]}
served = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"policy": {"tool_call": True}}}
Path("opencode.json").write_text(json.dumps({"provider": {"sluice": served}, "autoupdate": False}))
own = {"GEMINI_CLI_TRUST_WORKSPACE": "true", "DISABLE_NON_ESSENTIAL_MODEL_CALLS": "1", "IS_SANDBOX": "1"}
done = subprocess.run(
    [agent, *COMMANDS[name], task["prompt"]],
    env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False, timeout=150,
)  # fmt: skip
sys.stdout.write(done.stdout.decode())
reward = float(task["label"] in done.stdout.decode())
urlopen(Request(task["reward_url"], json.dumps(reward).encode()), timeout=30).read()
