"""Lets an agent practise: it poses problems, runs the agent on each of them several times, and
reports what each run has earned. It knows nothing of streamrl but the gateway's address.

    python practice.py AGENT GATEWAY [SESSIONS]

AGENT is the name of a file next to this: with_openai, with_anthropic or with_agents_sdk. GATEWAY is
an address such as http://127.0.0.1:8700. STREAMRL_GATEWAY_KEY is the key that opens sessions, as
`streamrl gateway-key` prints it. Without SESSIONS it continues until the gateway is gone.

The problem is `7*8=`. The agent has a calculator, which the policy is to call and whose result it
is to say. Both are worth half a point.
"""

import importlib
import json
import os
import random
import re
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import count

GROUP_SIZE = 8  # runs on a problem; the run file has it as buffer.group_size
PARALLEL = 48  # sessions at a time
PATIENCE_S = 60.0  # The gateway may be away for so long, while it is started again.


def calculator(expression):
    """What an expression such as 3*4 comes to."""
    first, operator, second = expression[:1], expression[1:2], expression[2:]
    if not (first.isdecimal() and second.isdecimal() and operator in ("+", "*")):
        return "?"
    return str(int(first) + int(second) if operator == "+" else int(first) * int(second))


def practise(agent, gateway, task, group):
    """One session: the agent works on a problem, and we say what that has earned."""
    problem = random.Random(task)
    expression = f"{problem.randint(1, 9)}{problem.choice('+*')}{problem.randint(1, 9)}"

    opened = post(
        gateway,
        "/rl/start_session",
        os.environ["STREAMRL_GATEWAY_KEY"],
        {"task_id": str(task), "group_id": group},
    )
    key = opened["grading_key"]  # which the agent does not get

    try:
        texts = agent.solve(gateway, opened["api_key"], f"{expression}=", calculator)
    except Exception as error:  # the run has failed, which is not a reward of 0
        post(gateway, "/rl/end_session", key, {"failure": repr(error)[:200]})
        return

    answered = texts[-1] if len(texts) > 1 else ""
    rewards = {
        "call": positions_right(f"[{expression}]", texts[0]),
        "answer": positions_right(calculator(expression), answered),
    }
    for name, value in rewards.items():
        post(gateway, "/rl/set_reward", key, {"name": name, "reward": value})
    post(gateway, "/rl/end_session", key, {})
    done = json.dumps({"session": opened["session_id"], "calls": len(texts)})
    print(done + "\n", end="", flush=True)  # in one piece: other threads print too


def positions_right(expected, found):
    """The share of the positions of a text that are right; what comes after its end is wrong. A
    special token, such as <user>, takes one position.
    """
    found = re.findall(r"<\w+>|.", found, re.DOTALL)
    right = sum(a == b for a, b in zip(expected, found, strict=False))
    return right / max(len(expected), len(found), 1)


def post(gateway, path, key, body):
    """Send JSON to the gateway. Waits while it has no room, or is being started again."""
    request = urllib.request.Request(
        url=gateway + path,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": "Bearer " + key},
    )
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code in (429, 503):
                deadline = time.monotonic() + PATIENCE_S
            elif error.code < 500 or time.monotonic() > deadline:
                raise SystemExit(f"{path}: {error.code} {error.read().decode()}") from None
        except OSError:
            if time.monotonic() > deadline:
                raise SystemExit(f"the gateway {gateway} is gone") from None
        time.sleep(0.2)


def main(name, gateway, sessions="0"):
    agent = importlib.import_module(name)
    began = time.time_ns()
    running = deque()
    with ThreadPoolExecutor(PARALLEL) as pool:
        for task in count():
            if sessions != "0" and task * GROUP_SIZE >= int(sessions):
                break
            group = f"{began}-{task}"
            for _ in range(GROUP_SIZE):
                running.append(pool.submit(practise, agent, gateway, task, group))
            while len(running) > 2 * PARALLEL:
                running.popleft().result()
        for each in running:
            each.result()


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])
