"""Makes a rollout, with the very tokens that the policy saw, of what an OpenAI-compatible server
answered: docs/design/inference-context.md.

It is for envs that call chat completions themselves, such as examples/chat_env.py. They have to ask
for `logprobs=True` and `return_token_ids=True`, because the ids that a server sends decide. Without
them the prompt is tokenised here, with the template that the server applies, and the answer's BPE
tokens are looked up (`Ġhello`, not ` hello`; vLLM prints decoded text, so it has to send ids).

The gateway's answers name the policy version and the temperature of each token. vLLM's
chat completions do not, so the context is told both: the temperature that the env asks for, and the
version that `servers` had before it asked. Without either a rollout is not trained on. Envs that
sample through `client.py` need none of this: it handles ids only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from streamrl.stream.records import InferenceMetadata, Rollout, Turn, VersionSpan
from streamrl.stream.records.compact import compact_ids, compact_logprobs
from streamrl.system.errors import ModelError
from streamrl.system.text import one_line

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

logger = logging.getLogger(__name__)

FEW_TOKENS = 5  # an answer of fewer is worth a warning
LEAST_LOGPROB = -100.0  # of a token that was sampled; servers write -9999 for what they do not know
ID_PREFIX = "token_id:"  # how vLLM prints tokens under `return_tokens_as_token_ids`
NO_VERSION = "its policy version is unknown; give the context its policy_version"
NO_TEMPERATURE = "its temperature is unknown; give the context its temperature"
Messages = Sequence[Mapping[str, Any]]


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    unk_token: Any
    unk_token_id: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def convert_tokens_to_ids(self, tokens: Any) -> Any: ...
    def encode(self, text: str, **options: Any) -> Any: ...


class InferenceContext:
    """The tokenizer of the served model, and rollouts made with it. `counts` are this context's,
    since it was made.

    `temperature` is what the env samples at, and `policy_version` what `servers` has told it of.
    They count where the answer does not have them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        temperature: float | None = None,
        policy_version: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.policy_version = policy_version
        self.counts: Counter[str] = Counter(
            dict.fromkeys(
                ("rollouts", "misaligned", "short", "template_failures", "unchecked", "suspicious"),
                0,
            )
        )

    @classmethod
    def of_model(
        cls,
        directory: str | Path,
        temperature: float | None = None,
        policy_version: int | None = None,
    ) -> InferenceContext:
        """A context with the tokenizer of a Hugging Face directory. Raises ModelError."""
        from transformers import AutoTokenizer  # takes seconds

        try:
            return cls(
                AutoTokenizer.from_pretrained(str(directory), local_files_only=True),
                temperature,
                policy_version,
            )
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{directory}: no tokenizer can be loaded from there ({one_line(error)})"
            ) from None

    def tokenize_prompt(self, prompt: str | Messages) -> np.ndarray:
        """The tokens of the prompt that the server makes of a user's message, or of a conversation,
        by its chat template with the generation prompt.

        Returns (p,) int32. If the template fails, `role: content` lines are tokenised instead, with
        a warning. Raises ValueError if there are no tokens.
        """
        messages: Messages = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str):
            messages = list(prompt)
        try:
            tokens = self.tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # templates are programs: whatever they raise
            self.counts["template_failures"] += 1
            logger.warning(
                "chat template failed, formatting the messages plainly: %s: %s",
                type(error).__name__,
                error,
            )
            text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
            tokens = self.tokenizer.encode(text, add_special_tokens=True)
        if not len(tokens):
            raise ValueError(f"no tokens come of the prompt {str(prompt)[:100]!r}")
        return np.array(tokens, np.int32)

    def response_tokens_from_choice(self, choice: Choice) -> np.ndarray:
        """The sampled ids: those that the server sends, or else its BPE tokens looked up. Returns
        (n,) int32.

        Raises ValueError for missing logprobs, for zero tokens, and for a token that the vocabulary
        does not have (the server prints decoded text).
        """
        content = self._content(choice)
        tokens = getattr(choice, "token_ids", None)
        if tokens is None:
            tokens = [self._id_of(entry.token) for entry in content]
        if not len(tokens):
            raise ValueError("the choice has zero tokens")
        return np.array(tokens, np.int32)

    def logprobs_from_choice(self, choice: Choice) -> np.ndarray:
        """The logprobs of the sampled tokens, in the distribution that the server reports: (n,)
        float32. Raises ValueError for missing logprobs.
        """
        return np.array([entry.logprob for entry in self._content(choice)], np.float32)

    def create_rollout_from_choice(
        self,
        prompt: str | Messages,
        choice: Choice,
        env_name: str,
        env_example_id: str,
        reward: float,
        *,
        prompt_token_ids: Sequence[int] | None = None,  # `completion.prompt_token_ids`
        token_rewards: Sequence[float] | None = None,  # one a sampled token, on top of `reward`
        how: InferenceMetadata | None = None,
        # counts where neither `how` nor the choice has version spans; by default the context's
        policy_version: int | None = None,
        group_id: str = "",  # another one where the same example is posed again
        sample: int | None = None,  # otherwise the choice's index
        producer: str = "",
    ) -> Rollout:
        """One rollout of prompt and answer.

        Ids that differ from `tokenize_prompt`, logprobs that are not one a token, no temperature
        and no policy version leave it `misaligned`: the buffer ends it as invalid. Without
        `prompt_token_ids` nothing can be compared, which is warned of, counted and noted in the
        metadata, as are suspicious logprobs. Raises ValueError as the methods above do.
        """
        own = self.tokenize_prompt(prompt)
        asked = own
        doubts: dict[str, str] = {}
        if prompt_token_ids is None:
            doubts["prompt_token_ids"] = "not sent"
        else:
            asked = np.array(prompt_token_ids, np.int32)
        tokens = self.response_tokens_from_choice(choice)
        logprobs = self.logprobs_from_choice(choice)
        suspicion = suspicious(logprobs)
        if suspicion:
            doubts["logprobs"] = suspicion
        unsaid = ""
        if policy_version is None:
            policy_version = self.policy_version
        if how is None:
            how, unsaid = _how_sampled(choice, self.temperature)
        versions = [span.version for span in how.version_spans]
        if not versions and policy_version is not None:
            versions = [policy_version]
        if not versions:
            versions = [0]
            unsaid = NO_VERSION
        cause = misalignment(own, asked, len(tokens), len(logprobs)) or unsaid
        self._note(env_example_id, len(tokens), cause, doubts)
        if sample is None:
            sample = choice.index
        answer = Turn(
            message=choice.message.content or "",
            role="assistant",
            tokens=compact_ids(tokens.astype(np.uint32)),
            logprobs=None if cause else compact_logprobs(logprobs),
            token_rewards=None if token_rewards is None else np.array(token_rewards, np.float32),
            inference_metadata=how,
        )
        group = group_id or f"{env_name}-{env_example_id}"
        return Rollout(
            environment=env_name,
            problem_id=env_example_id,
            rollout_uid=f"{group}-{sample}",
            group_id=group,
            producer=producer or f"{env_name}-0",
            turns=[
                Turn(
                    message=_shown(prompt), role="user", tokens=compact_ids(asked.astype(np.uint32))
                ),
                answer,
            ],
            reward=float(reward) + float(sum(token_rewards or ())),
            rewards={"reward": float(reward)},
            temperature=how.temperature,
            policy_version=min(versions),
            newest_policy_version=max(versions),
            truncated=choice.finish_reason == "length",
            misaligned=cause,
            metadata=doubts,
        )

    def metrics(self) -> dict[str, float]:
        """Counts of the rollouts that were made, of those that are misaligned or short, and of
        failures of the template.
        """
        return {f"inference_context/{name}": float(count) for name, count in self.counts.items()}

    def _content(self, choice: Choice) -> Sequence[Any]:
        if choice.logprobs is None or choice.logprobs.content is None:
            raise ValueError("the choice is missing logprobs; ask for them with logprobs=True")
        if not choice.logprobs.content:
            raise ValueError("the choice has zero tokens")
        return choice.logprobs.content

    def _id_of(self, token: str) -> int:
        if token.startswith(ID_PREFIX) and token.removeprefix(ID_PREFIX).isdecimal():
            return int(token.removeprefix(ID_PREFIX))
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        if token_id is None or (
            token_id == self.tokenizer.unk_token_id and token != self.tokenizer.unk_token
        ):
            raise ValueError(
                f"{token!r} is no token of the vocabulary: the server prints decoded text; ask it"
                " for ids with return_token_ids"
            )
        return int(token_id)

    def _note(self, example: str, tokens: int, cause: str, doubts: Mapping[str, str]) -> None:
        self.counts["rollouts"] += 1
        if tokens < FEW_TOKENS:
            self.counts["short"] += 1
            logger.warning("only %d tokens for %s", tokens, example)
        if "prompt_token_ids" in doubts:
            self.counts["unchecked"] += 1
            if self.counts["unchecked"] == 1:
                logger.warning(
                    "%s has no prompt_token_ids, so its prompt cannot be compared; ask vLLM for"
                    " them with return_token_ids",
                    example,
                )
        if "logprobs" in doubts:
            self.counts["suspicious"] += 1
            logger.warning("suspicious logprobs of %s: %s", example, doubts["logprobs"])
        if cause:
            self.counts["misaligned"] += 1
            logger.warning("%s is not trained on: %s", example, cause)


def suspicious(logprobs: np.ndarray) -> str:
    """Why these can hardly be the logprobs of sampled tokens, in a line. Empty if they can."""
    if len(logprobs) > 1 and not logprobs.any():
        return f"all {len(logprobs)} are 0; was it sampled greedily, or were they left out?"
    above = np.flatnonzero(logprobs > 0)
    if above.size:
        return f"token {above[0]} has {logprobs[above[0]]:g}, above 0"
    below = np.flatnonzero(~(logprobs > LEAST_LOGPROB))
    if below.size:
        return f"token {below[0]} has {logprobs[below[0]]:g}, which no server samples"
    return ""


def _how_sampled(choice: Any, temperature: float | None) -> tuple[InferenceMetadata, str]:
    """How an answer was sampled, as far as the server reports it; and, in a line, what is missing.

    `temperature`: that of the answer if the server does not report it.
    """
    spans = [
        VersionSpan(version=int(span["version"]), start=span["start"], end=span["end"])
        for span in getattr(choice, "weight_versions", None) or ()
    ]
    reported = getattr(choice, "temperature", None)
    if reported is not None:
        temperature = float(reported)
    unsaid = ""
    if temperature is None:
        unsaid = NO_TEMPERATURE
        temperature = 1.0
    how = InferenceMetadata(
        server="",
        temperature=temperature,
        finish_reason=choice.finish_reason,
        version_spans=spans,
    )
    return how, unsaid


def _shown(prompt: str | Messages) -> str:
    """The prompt as the message of a turn."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)


def misalignment(own: np.ndarray, sent: np.ndarray, tokens: int, logprobs: int) -> str:
    """Why prompt and answer cannot be what the policy saw, in a line. Empty if they can.

    `own`: (p,) ids of the prompt as tokenised here; `sent`: (q,) ids that the server has sent.
    """
    if tokens != logprobs:
        return f"{tokens} sampled tokens with {logprobs} logprobs"
    if len(own) != len(sent):
        return (
            f"the server's prompt has {len(sent)} tokens, tokenize_prompt gives {len(own)}: is it"
            " the served model's tokenizer and template?"
        )
    differ = np.flatnonzero(own != sent)
    if differ.size:
        at = int(differ[0])
        return (
            f"token {at} of the server's prompt is {sent[at]}, tokenize_prompt gives {own[at]}: is"
            " it the served model's tokenizer and template?"
        )
    return ""
