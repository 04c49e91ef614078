"""An agent, and the loop that trains it: each problem eight times, and what each time earned."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx  # comes with openai
from openai import OpenAI

GATEWAY = "http://127.0.0.1:8700"
GROUP_SIZE = 8  # buffer.group_size of the run file


def agent(client, question):
    """Your agent, as it is. What it asks through this client is trained on."""
    asked = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model="policy", messages=asked)
    return answer.choices[0].message.content


def practise(number):
    """A session: the agent works on problem `number`, and earns 1 for the right answer."""
    opened = post("/rl/start_session", os.environ["STREAMRL_GATEWAY_KEY"], task_id=str(number))
    key = opened["grading_key"]  # which the agent does not get
    try:
        client = OpenAI(base_url=opened["base_url"], api_key=opened["api_key"])
        answer = agent(client, f"{number}+{number}=")
    except Exception as error:  # Nothing was earned, and nothing is trained on.
        post("/rl/end_session", key, failure=repr(error)[:500])
        return
    post("/rl/set_reward", key, reward=float(answer == str(2 * number)))
    post("/rl/end_session", key)


def post(path, key, **body):
    """Ask the gateway, and ask again while it has no room or no server is ready."""
    while True:
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(GATEWAY + path, headers=headers, json=body, timeout=60)
        if answer.status_code not in (429, 503):
            return answer.raise_for_status().json()
        time.sleep(int(answer.headers["retry-after"]))


if __name__ == "__main__":
    problems = range(int(sys.argv[1]))
    with ThreadPoolExecutor(4 * GROUP_SIZE) as pool:
        for _ in pool.map(practise, (number for number in problems for _ in range(GROUP_SIZE))):
            pass
