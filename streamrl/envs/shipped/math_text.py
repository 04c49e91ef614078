"""Finds the mathematics that a text states as its answer, and writes it in one way for
math-verify.

A box comes first. Without one it is what follows the last "answer is", "Answer:" or "####", then
the last formula between dollars, and at last the last mathematics of the last sentence that has a
number.
"""

from __future__ import annotations

import re

from streamrl.envs.shipped.answers import JOINT, closed_boxes, in_box, in_tag
from streamrl.envs.shipped.number_words import SCALES

# "The final answer is:", "**Answer**", "####". What is between the noun and the verb is bounded.
STATED = re.compile(
    r"(?i)####|\banswers?\b[^\n.:=$\\]{0,60}?[*_]{0,3}\s*(?:\bis\b|\bare\b|:|=|\n)(?:[*_:\s]|is\b)*"
    r"|(?m:^A: )|答案(?:应该)?(?:是|为|為|:|=)[*_:\s]*"
)
IT_IS = re.compile(
    r"(?i)^(?:(?:so|thus|hence|therefore|then)\b,?\s*)?(?:it|this|that|there)(?: is| are| was|'s)"
    r"\s+"
)
SENTENCE_END = re.compile(r"\n|(?<!\\)[.!?;](?=\s|$)")
FORMULA = re.compile(
    # A dollar before a digit ends no formula: "9 for $2 = **$18**" has two prices.
    r"(?<!\\)\$\$(?P<display>(?:[^$\\]|\\.)+)\$\$"
    r"|(?<!\\)\$(?P<dollars>(?:[^$\n\\]|\\[^\n])+)\$(?!\d)"
    r"|\\\((?P<round>(?:(?!\\\().)+?)\\\)|\\\[(?P<square>(?:(?!\\\[).)+?)\\\]",
    re.DOTALL,
)
CJK = "[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"  # letters of Chinese, Japanese and Korean
TOKEN = re.compile(
    r"\\(?:text|textbf|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+|\\.|[A-Za-z]+"
    rf"|{CJK}+|.",
    re.DOTALL,
)
# Words of letters that are mathematics, or units that the library takes off.
MATH_WORDS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh"),
    *("tanh", "exp", "log", "ln", "lim", "max", "min", "gcd", "lcm", "mod", "det", "sqrt", "pi"),
    *("inf", "oo", "and", "or", *SCALES),
)
SHORT_WORDS = (
    *("am", "an", "as", "at", "be", "by", "do", "go", "he", "if", "in", "is", "it", "me", "my"),
    *("no", "of", "on", "so", "to", "up", "us", "we"),
)
NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
PLAIN_NUMBER = re.compile(rf"{NUMBER}(?:[eE][-+]?\d+)?")
BOLD = re.compile(r"(?<![\w)}*])(\*\*|__)(?=[^\s*_])([^*_\n]+)\1")
# An operator at the begin of a run has lost its first number: "9 eggs × $2 = $18".
OPERATOR = re.compile(r"\s*(?:[×·÷*/=]|\\times\b|\\cdot\b|\\div\b)")
YES_OR_NO = re.compile(r"(?i)\b(?:yes|no|true|false)\b")
YES_NO = re.compile(r"(?i)(yes|no|true|false)[.,;:!]")
# What a sentence has that takes its number back.
TAKEN_BACK = re.compile(r"(?i)\b(?:is|are|was|be)\s+(?:wrong|incorrect|false|impossible)\b")
BOUND = re.compile(r"(?i)(?:\w+ly )?(?:more|less|greater|fewer|larger|smaller|higher|lower) than\b")
TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox|operatorname|mathbf)\s*\{([^{}]*)\}")
# Words in a box after which its number is none that was asked for.
NO_ANSWER = re.compile(r"(?i)\b(?:not|no|never|than|between|except|or|to)\b")


def stated_math(text: str) -> str | None:
    """The mathematics that a text states as its answer. None if there is none, or if a box or a tag
    is open. The text has no thoughts.
    """
    if "<answer>" in text:
        text = in_tag(text) or ""
    boxes = closed_boxes(text)
    if boxes is None:
        return None
    if boxes:
        return in_box(text)
    text = BOLD.sub(r"\2", text)
    stated = stated_text(text)
    if stated is not None and (re.match(r"(?i)(?:\w+ly )?not\b", stated) or BOUND.match(stated)):
        return None
    if stated is not None:
        return _formulas(stated) or _first_run(stated)
    return _formulas(text) or _whole_or_last_run(text)


def stated_text(text: str) -> str | None:
    """What follows the last "answer is", "Answer:" or "####", to the end of its sentence or
    formula. None if a text has none of these.
    """
    begin = -1
    for match in STATED.finditer(text):
        begin = match.end()
    if begin < 0:
        return None
    rest = text[begin:].strip()
    formula = FORMULA.match(rest)
    begin = formula.end() if formula else 0
    end = SENTENCE_END.search(rest, begin)
    return trimmed(rest[: end.start()] if end else rest)


def trimmed(text: str) -> str:
    """A text without the marks that are put around an answer."""
    text = text.replace("</answer>", "")
    return text.strip().strip("*_`\"'“”").strip().rstrip(".,;:!").strip("*_` ")


def unwrapped(box: str) -> str | None:
    """The one number or formula among the words in a box: 12 in `\\text{The answer is }12`. None if
    a box has no such words, or words that deny it or make it one of several.
    """
    plain = TEXT.sub(r"\1", box).replace("$", "")
    first = next((token for token in TOKEN.findall(plain) if is_word(token)), None)
    in_words = "".join(TEXT.findall(box))
    is_number_first = first is not None and re.search(r"[\d\\]", plain[: plain.index(first)])
    if first is None or (is_number_first and not re.search(r"\d", in_words)):
        return None
    runs = _runs(plain)
    return None if len(runs) != 1 or NO_ANSWER.search(plain) else runs[0]


def said_words(text: str) -> list[str]:
    """What a text without a box states in words: the statement of an answer; or all of it without
    an "It is" before it, what its last sentence tells that something is, and the Yes or No that it
    begins with.
    """
    if "<answer>" in text:
        text = in_tag(text) or ""
    stated = stated_text(text)
    if stated is not None:
        return [stated]
    whole = trimmed(text)
    said = [trimmed(IT_IS.sub("", whole))]
    last = SENTENCE_END.split(whole)[-1]
    if not re.search(r"(?i)\b(?:not|no|never|neither|nor|if|or)\b|n't\b|\?", last):
        said.append(trimmed(re.split(r"\b(?:is|are|was|were)\b", last)[-1]))
    first = YES_NO.match(whole)
    if first and len({word.lower() for word in YES_OR_NO.findall(whole)}) == 1:
        said.append(first[1])
    return said


def _formulas(text: str) -> str | None:
    """The last formula between dollars or brackets, with those that are joined to it. None if there
    is none, or if what is between the dollars is prose, as between two prices.
    """
    formulas = [*FORMULA.finditer(text)]
    if not formulas:
        return None
    last = formulas[-1]
    held = [_held(last)]
    for formula in reversed(formulas[:-1]):
        if not JOINT.fullmatch(text, formula.end(), last.start()):
            break
        held.append(_held(formula))
        last = formula
    if any(_is_prose(one) for one in held):
        return None
    return ", ".join(dict.fromkeys(reversed(held)))


def _held(formula: re.Match[str]) -> str:
    held = next(group for group in formula.groups() if group is not None)
    factorial = "!" if held.rstrip().endswith("!") else ""
    return trimmed(held) + factorial


def _is_prose(text: str) -> bool:
    return any(is_word(token) for token in TOKEN.findall(text))


def is_word(token: str) -> bool:
    """Whether a token of a text is a word of a sentence."""
    if re.match(CJK, token):
        return True
    if not token.isalpha() or len(token) == 1 or token.lower() in MATH_WORDS:
        return False
    return len(token) > 2 or token.lower() in SHORT_WORDS


def _runs(text: str) -> list[str]:
    """The stretches of a text between its words that have mathematics in them."""
    runs: list[str] = []
    run: list[str] = []
    for token in [*TOKEN.findall(text), "end"]:
        if not is_word(token):
            run.append(token)
            continue
        joined = _joint_off("".join(run))
        if re.search(r"\d|\\[A-Za-z]", joined):
            runs.append(joined)
        run = []
    return runs


def _joint_off(run: str) -> str:
    """A run without "and", "or" and marks at its ends, and without a bracket that has no other."""
    run = re.sub(r"(?i)^(?:\s|[,;:.]|\band\b|\bor\b)+", "", run)
    if OPERATOR.match(run):
        run = run[run.rfind("=") + 1 :]
    run = re.sub(r"(?i)\b(?:and|or)$", "", run.rstrip())
    run = trimmed(run)
    if run.count("(") + run.count("[") > run.count(")") + run.count("]"):
        run = run.rstrip("([ ")
    run = run.rstrip("/ ")
    return trimmed(run)


def _first_run(text: str) -> str | None:
    """The first mathematics of a statement, or all of it if there is none: a text is an answer,
    too. None if the statement offers another number after an "or".
    """
    runs = _runs(text)
    if not runs:
        return text
    if len(runs) > 1 and re.search(r"(?i)\bor\b", text):
        return None
    return runs[0]


def _whole_or_last_run(text: str) -> str | None:
    """All of a text that is mathematics only; otherwise the last mathematics of its last sentence
    that has some. A text without any is an answer if it is a few words.
    """
    whole = trimmed(text)
    if not whole:
        return None
    if not _is_prose(whole) and "\n" not in whole:
        return whole
    for sentence in reversed(re.split(r"\n|(?<=[^\\][.!?;])\s", whole)):
        runs = _runs(sentence)
        if runs:
            if TAKEN_BACK.search(sentence):
                return None
            if len(runs) > 1 and re.search(r"(?i)\bor\b", sentence):
                return None
            return runs[-1]
    return whole if len(whole) <= 100 else None
