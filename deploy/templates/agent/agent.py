"""An agent, and the loop that trains it: eight sessions on each problem, and what each earned.

    python {name}_agent.py PROBLEMS

STREAMRL_GATEWAY_KEY opens sessions; `streamrl gateway-key {name}.yaml my-agent` prints it.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from openai import OpenAI

GATEWAY = "http://127.0.0.1:8700"
GROUP_SIZE = 8  # buffer.group_size of the run file


def agent(client, question):
    """Replace this by your agent. What it asks through the client is trained on."""
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.content


def practise(number):
    """One session: the agent works on a problem and earns 1 for the right answer."""
    digit = number % 10
    opened = post("/rl/start_session", os.environ["STREAMRL_GATEWAY_KEY"], task_id=str(number))
    key = opened["grading_key"]  # the agent does not get this one
    try:
        client = OpenAI(base_url=opened["base_url"], api_key=opened["api_key"])
        answer = agent(client, f"{digit}=")
    except Exception as error:  # a failed session is not a reward of 0
        post("/rl/end_session", key, failure=repr(error)[:500])
        return
    post("/rl/set_reward", key, name="right", reward=float(answer == str(digit)))
    post("/rl/end_session", key)


def post(path, key, **body):
    """Ask the gateway. Ask again while it has no room or no server is ready."""
    while True:
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(GATEWAY + path, headers=headers, json=body, timeout=60)
        if answer.status_code not in (429, 503):
            return answer.raise_for_status().json()
        time.sleep(int(answer.headers["retry-after"]))


if __name__ == "__main__":
    numbers = (number for number in range(int(sys.argv[1])) for _ in range(GROUP_SIZE))
    with ThreadPoolExecutor(4 * GROUP_SIZE) as pool:
        for _ in pool.map(practise, numbers):
            pass
