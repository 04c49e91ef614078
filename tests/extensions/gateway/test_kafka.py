"""Replicas on a real broker."""

from __future__ import annotations

from pathlib import Path

import httpx

from streamrl.config import topology
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Reward, SessionEnd
from tests.extensions.gateway.test_replica import RETRY, Agent
from tests.support.gateways import ENV, TOPICS, gateways
from tests.support.kafka import make_topics


def test_a_session_goes_on_over_replicas_and_transactions_of_others(
    tmp_path: Path, broker: str, run_name: str
):
    make_topics(broker, {f"{run_name}.{topic}": count for topic, count in TOPICS.items()})
    log = KafkaLog({"bootstrap.servers": broker}, run_name)
    with gateways(tmp_path, log=log) as gateway:
        urls = [gateway.start(), gateway.start()]
        agent = Agent(gateway, urls[0])
        assembler = log.writer("assembler")
        said = ["q0"]
        for turn in range(4):
            url = urls[turn % 2]
            said += [agent.text(url, *said), f"q{turn + 1}"]
            # the assembler ends another session, in a transaction
            other = Agent(gateway, url, f"other-{turn}")
            end = Output(topology.turns(ENV), f"other-{turn}", SessionEnd(session=f"other-{turn}"))
            assembler.commit([to_message(end)])
            assert other.send(urls[1 - turn % 2], "q").status_code == 409
        last = agent.text(urls[0], *said)
        assert agent.text(urls[1], *said, **RETRY) == last
        gateway.stop(urls[0])
        given = {"reward": 0.5}
        rewarded = httpx.post(f"{urls[1]}/rl/set_reward", json=given, headers=agent.grading)
        assert rewarded.status_code == 200, rewarded.text
        # Others may have had a call after their end. It is refused once the end is visible.
        calls = [call for call in gateway.calls() if call.session == "s0"]
        (reward,) = [
            each for each in gateway.records(topology.turns(ENV)) if isinstance(each, Reward)
        ]
        assembler.close()
    assert [call.continues for call in calls] == ["", *(call.call for call in calls[:-1])]
    assert len(calls) == 5 and not any(call.fork for call in calls)
    assert isinstance(reward, Reward) and reward.value == 0.5
