"""Whether two answers are the same mathematics, by math-verify, with what it does not tell apart.

This runs in a separate process (`math_verify.py`), since it reads what a policy wrote.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from streamrl.envs.shipped.math_text import CJK, NUMBER, PLAIN_NUMBER, TOKEN, is_word

# Signs that keyboards and models have for LaTeX's.
SIGNS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ",
    "÷": "/", "⁄": "/", "∕": "/", "√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∅": r"\emptyset ", "°": r"^\circ ", "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
    "€": r"\$", "£": r"\$", "¥": r"\$",
}  # fmt: skip
SIGN = re.compile("|".join(map(re.escape, SIGNS)))
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
# Spellings that the library reads as products of letters or digits, or does not read.
SPELLINGS: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:\{,\}|\\[,;:! ]|[ ~])\d{3})+)(?![\d,])"), ""),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.])"), r"\1\\times 10^{\2}"),
    (re.compile(r"(?<=\d)\s*[xX*]\s*10\s*\^"), r"\\times 10^"),
    (re.compile(r"\\varnothing\b"), r"\\emptyset"),
    (re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\sqrt +(\d+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])pi\b"), r"\\pi"),
    (re.compile(r"(?<![\\A-Za-z])(?:infinity|inf|oo)\b"), r"\\infty"),
    (re.compile(r"(?i)(?<=\d)\s*percent\b"), r"\\%"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\degree\b"), r"^\\circ"),
    (re.compile(r"(?<=\d)\s+i(?!\w)"), "i"),
    (re.compile(r"\^(?:\{0?\.5\}|0\.5(?!\d))"), "^{1/2}"),
    (re.compile(r"(?<![\d/.])(\d+) (\d+)/(\d+)(?![\d/.])"), r"\1\\frac{\2}{\3}"),
]
THOUSANDS = SPELLINGS[0][0]
TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox|operatorname|mathbf)\s*\{([^{}]*)\}")
SPACE = re.compile(r"\\[,;:! ]|\\q?quad\b|~")
# 0.1\overline{6}: the digits before the point, after it, and those that repeat.
REPEATING = re.compile(r"(\d{1,9})\.(\d{0,9})\\(?:overline|dot|bar)\s*(?:\{(\d{1,9})\}|(\d))")
# "(B) 12", "B. 12": a choice with what it is.
CHOICE = re.compile(r"\(([A-J])\)(?: .*)?|([A-J])(?:[).:] .*)?", re.DOTALL)
# A date, or a range of two whole numbers: no difference.
AS_WRITTEN = re.compile(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}|\d+ ?- ?\d+")
# Arithmetic that was left to do, which a prompt may have asked for.
ARITHMETIC = re.compile(r"[\d)}][\s})]*(?:[-+*]|\\times|\\cdot)[\s({]*\\?[\d(f]")
SCIENTIFIC = re.compile(rf"\s*{NUMBER}\s*\\times\s*10\s*\^\s*(?:\{{\s*[-+]?\d+\s*\}}|\d)\s*")
BASE = re.compile(r"_\{?\s*(?:\\text\s*\{)?\s*(\w+)\s*\}?\}?$")
BRACKETS = {"(": ")", r"\{": r"\}"}
# Units of one dimension by their names, for the library takes all of them off.
UNITS = {
    name: names[0]
    for names in (
        ("km", "kilometer", "kilometers", "kilometre", "kilometres"),
        ("m", "meter", "meters", "metre", "metres"),
        ("cm", "centimeter", "centimeters", "centimetre", "centimetres"),
        ("mm", "millimeter", "millimeters", "millimetre", "millimetres"),
        ("mile", "miles", "mi"),
        ("foot", "feet", "ft"),
        ("inch", "inches"),
        ("yard", "yards"),
        ("kg", "kilogram", "kilograms"),
        ("g", "gram", "grams"),
        ("mg", "milligram", "milligrams"),
        ("second", "seconds", "sec"),
        ("minute", "minutes", "min"),
        ("hour", "hours", "hr", "hrs"),
        ("day", "days"),
        ("week", "weeks"),
        ("month", "months"),
        ("year", "years"),
        ("dollar", "dollars"),
        ("cent", "cents"),
    )
    for name in names
}
UNIT_AT_END = re.compile(
    rf"(?i)(\d)\s*(?:{'|'.join(name for name in UNITS if len(name) > 2)}|{CJK}{{1,6}})$"
)
# Two numbers that the library takes for equal because both are nearly 0 have to be so close.
NEAR = 1e-3


def equal(right: str, answer: str) -> bool:
    """Whether an answer is the right one. Both are LaTeX or plain text, without dollars."""
    right = respelled(right)
    answer = respelled(answer)
    if not right or not answer:
        return False
    if as_words(right) == as_words(answer):
        return True
    if _choice(right) and _choice(answer):
        return _choice(right) == _choice(answer)
    if is_text(right) or AS_WRITTEN.fullmatch(right):
        return as_words(right) == as_words(answer)
    if PLAIN_NUMBER.fullmatch(right) and (_is_left_to_do(answer) or _is_untrue(answer)):
        return False
    if _unit(right) and _unit(answer) and _unit(right) != _unit(answer):
        return False
    right = UNIT_AT_END.sub(r"\1", right)
    answer = UNIT_AT_END.sub(r"\1", answer)
    if _brackets(right) and _brackets(answer) and _brackets(right) != _brackets(answer):
        return False
    if _base(right) and _base(answer) and _base(right) != _base(answer):
        return False
    return _same_for_library(right, answer)


def is_usable(right: str) -> bool:
    """Whether a right answer is equal to itself, not only as a text: other spellings of it are
    compared by the library.
    """
    right = respelled(right)
    if is_text(right) or AS_WRITTEN.fullmatch(right):
        return True
    return bool(right) and _same_for_library(right, right)


def respelled(text: str) -> str:
    """A text with signs and numbers as LaTeX writes them."""
    text = SIGN.sub(lambda match: SIGNS[match[0]], text)
    text = SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(SUPERSCRIPTS)}}}", text)
    text = REPEATING.sub(_fraction, text)
    text = THOUSANDS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), text)
    for pattern, spelling in SPELLINGS[1:]:
        text = pattern.sub(spelling, text)
    return text.strip().rstrip(".,;").strip()


def _fraction(repeating: re.Match[str]) -> str:
    """The fraction that a decimal number with digits that repeat is."""
    fixed = repeating[1] + repeating[2]
    period = repeating[3] or repeating[4]
    numerator = int(fixed + period) - int(fixed)
    return f"\\frac{{{numerator}}}{{{(10 ** len(period) - 1) * 10 ** len(repeating[2])}}}"


def _choice(text: str) -> str:
    """The letter of a choice that an answer is, with or without what is chosen."""
    text = " ".join(SPACE.sub(" ", TEXT.sub(r"\1", text)).split())
    match = CHOICE.fullmatch(text)
    return (match[1] or match[2]) if match else ""


def as_words(text: str) -> str:
    """A text in one spelling: without commands for text, marks at its ends, and brackets around a
    single word. Words have no upper case.
    """
    text = SPACE.sub(" ", respelled(TEXT.sub(r"\1", text)))
    text = " ".join(text.replace("$", " ").split()).strip("\"'`*_ ").rstrip(".,;:")
    while len(text) > 2 and text[0] in "({[" and text[-1] in ")}]" and text[1:-1].isalpha():
        text = text[1:-1]
    return text.rstrip("!").casefold() if is_text(text) else text


def is_text(text: str) -> bool:
    """Whether an answer is words, and no mathematics."""
    if re.search(r"[\d=^+<>]", text):
        return False
    return any(is_word(token) for token in TOKEN.findall(TEXT.sub(r"\1", text))) or bool(
        TEXT.fullmatch(text.strip())
    )


def _is_left_to_do(answer: str) -> bool:
    """Whether an answer is arithmetic that is left to do, as 2+2."""
    side = re.split(r"(?<![\\<>!])=", answer)[-1]
    return bool(ARITHMETIC.search(side)) and not SCIENTIFIC.fullmatch(side)


def _is_untrue(answer: str) -> bool:
    """Whether an answer is only what a number is not, or an equation that does not hold."""
    if re.match(r"\\(?:ne|neq|not)\b", answer):
        return True
    sides = [side.strip() for side in answer.split("=")]
    numbers = [float(side) for side in sides if PLAIN_NUMBER.fullmatch(side)]
    return len(numbers) == len(sides) and len({*numbers}) > 1


def _unit(text: str) -> str:
    """The unit that an answer ends with, if it is one that the library would take for another."""
    words = re.findall(r"[A-Za-z]+", TEXT.sub(r" \1 ", text))
    return UNITS.get(words[-1].lower(), "") if words and re.search(r"\d", text) else ""


def _brackets(text: str) -> str:
    """The bracket around an answer, if it is one that makes a difference: of a set, or of a
    tuple.
    """
    text = re.sub(r"\\(?:left|right)\s*", "", text).strip()
    for opening, closing in BRACKETS.items():
        if text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : -len(closing)]
            if "," in inner and opening not in inner and "\\cup" not in inner:
                return opening
    return ""


def _base(text: str) -> str:
    """The base of a number that is written with one; empty if there is none."""
    match = BASE.search(text)
    return match[1] if match and text[: match.start()].strip().isalnum() else ""


def _same_for_library(right: str, answer: str) -> bool:
    from math_verify import parse, verify

    # the library warns at every call that its time-outs are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(f"\\boxed{{{right}}}", parsing_timeout=0)
    given = parse(f"\\boxed{{{answer}}}", parsing_timeout=0)
    if not verify(gold, given, allow_set_relation_comp=True, timeout_seconds=0):
        return False
    return not (gold and given) or _are_near(gold[0], given[0])


def _are_near(right: Any, answer: Any) -> bool:
    """Whether two numbers, which the library takes for equal, differ by little of their size. True
    for whatever is no number.
    """
    try:
        first = complex(right)
        second = complex(answer)
    except Exception:  # SymPy raises whatever its classes raise
        return True
    return first == second or abs(first - second) <= NEAR * max(abs(first), abs(second))
